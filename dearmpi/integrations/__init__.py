"""How a framework's loop drives the optimizer, for scripts that mpirun starts by themselves.

``python -m dearmpi SCRIPT`` runs scripts of accelerate, transformers and Lightning unchanged. Here
is the same in the script: begin with ``serve``, and see the file named after the framework. A
framework is imported by its own file alone. The room stands on ``drop_in`` and public names.
"""

from dearmpi.integrations.serve import serve

__all__ = ["serve"]
