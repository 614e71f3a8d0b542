"""The HTTP/REST twin of the KServe v2 / Triton protocol, beside the operators' routes on the same port.

Every path, body and status is Triton's, so that its HTTP clients see no difference (protocol.md §13); the binary tensor
extension, compression, `generate` and `generate_stream` included. Where Triton leaves something loose, one rule holds:

- JSON is strict: UTF-8, no comments, no trailing commas, at most 100 levels deep. Syntax and type errors are 400 and
  name the member (Triton 2.51: 500). An empty body is no JSON, unless the route's body is optional.
- Numbers are never changed: a fraction or a number outside the datatype is refused for integers (Triton truncates),
  what FP32 cannot hold is refused for it (Triton makes it infinite). 64-bit integers are exact both ways.
- NaN, Infinity and -Infinity, which JSON cannot say, are strings in quotes in FP32 and FP64 tensors, as in protobuf's
  JSON: every parser reads them, and numpy turns them into the numbers. On the way in they may also stand bare, as
  Python's and Triton's clients write them: they are read as if they were quoted.
- BYTES are strings. Elements that are not UTF-8 are refused in JSON and travel in binary form (Triton sends invalid
  JSON). FP16 and BF16 have binary form alone.
- An `Inference-Header-Content-Length` that is no number is refused (Triton 2.51 takes it as 0).
- `generate` answers 400 where a model gives another number of responses than one (Triton 2.51: 200 with an error).
- A page of another origin in somebody's browser may not change the server: POSTs to load, unload, shared memory, trace
  and log settings with an `Origin` that is not ours are 403.
"""

from gateway.rest.endpoint import RestRules
from gateway.rest.routes import RestRoutes

__all__ = ["RestRoutes", "RestRules"]
