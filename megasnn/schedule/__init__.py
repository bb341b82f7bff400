"""Pipeline schedules as data: generated, completed by passes, validated, simulated and executed."""

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.build import SCHEDULE_NAMES, build_schedule, resolve_schedule_name
from megasnn.schedule.draw import format_actions
from megasnn.schedule.simulate import ChunkCost, Simulation, simulate
from megasnn.schedule.validate import ScheduleError, validate

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "ChunkCost",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "build_schedule",
    "format_actions",
    "resolve_schedule_name",
    "simulate",
    "validate",
]
