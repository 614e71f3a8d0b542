"""A descriptor pool of our own for package `inference`.

tritonclient and kserve ship files of the same package; a process that loads two of them into the default pool dies of
a duplicate symbol. Our generated files are rewritten by `make protos` to register here instead.
"""

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal import api_implementation

__all__ = ["POOL"]

if api_implementation.Type() != "upb":  # the pure-Python runtime shares its symbol table between pools
    raise ImportError(f"protobuf runs its '{api_implementation.Type()}' implementation; tensorline needs 'upb'")

POOL = DescriptorPool()
