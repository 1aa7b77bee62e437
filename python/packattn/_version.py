"""The version, in the one place that packaging, the native build and `packattn.__version__` read."""

__version__ = "0.1.0"
