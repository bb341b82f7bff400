"""Pipeline schedules as data: generated, completed by passes, validated, simulated and executed from one
object."""

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.build import SCHEDULE_NAMES, build_schedule, resolve_schedule_name

__all__ = ["Action", "Kind", "SCHEDULE_NAMES", "Schedule", "build_schedule", "resolve_schedule_name"]
