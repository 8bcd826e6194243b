"""Scripts written for torch's DistributedDataParallel, unchanged.

``wrapper.py`` has the class; begin there. ``serving.py`` decides which engine averages which
gradients of a wrapped model. ``step_hooks.py`` sees the steps of optimizers, and
``served_optimizer.py`` has an engine take them. ``arguments.py`` lists what DDP's arguments and
hooks mean here. ``start.py`` begins to serve, with ``replacement.py``; ``command.py`` is
``python -m dearmpi SCRIPT``. The room stands on the package's public names and ``torch_internals``.
"""
