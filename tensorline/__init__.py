"""Tensorline: the library that every process of the mesh is built from."""

__all__ = ["__version__"]

__version__ = "0.1.0"
