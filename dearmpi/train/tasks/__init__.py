"""The tasks that come with dearmpi, and those named by the user."""

from dearmpi.train.task_name import TASK_FORMS
from dearmpi.train.tasks.registry import build_task, prepare_to_load

__all__ = ["TASK_FORMS", "build_task", "prepare_to_load"]
