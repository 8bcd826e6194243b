"""Scripts written for torch's DistributedDataParallel, unchanged.

``wrapper.py`` has the class; begin there. ``serving.py`` decides which engine averages which
gradients of a wrapped model, and sees the steps of optimizers; ``served_optimizer.py`` has an
engine take them, and ``pending_parameters.py`` has readers of parameters wait for them.
``arguments.py`` lists what DDP's arguments and hooks mean here. ``start.py`` is ``python -m dearmpi
SCRIPT``, which puts its own classes in place of torch's, and what is in ``spawning.py`` in place of
``torch.multiprocessing.spawn``. The room stands on the package's public names and
``torch_internals``.
"""
