"""The tasks that come with dearmpi, and those named by the user."""

from dearmpi.train.tasks.registry import build_task, prepare_to_load
from dearmpi.train.tasks.task_name import TASK_FORMS

__all__ = ["TASK_FORMS", "build_task", "prepare_to_load"]
