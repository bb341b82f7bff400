"""Pipeline schedules as data: generated, completed by passes, validated, simulated and executed."""

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.build import SchedulePlan, build_schedule, plan_schedule
from megasnn.schedule.draw import format_actions
from megasnn.schedule.generate import generate
from megasnn.schedule.named import AUTO, SCHEDULES, equal_costs, per_stage
from megasnn.schedule.search import find_best
from megasnn.schedule.simulate import ChunkCost, Simulation, Transfer, chunk_costs, simulate
from megasnn.schedule.validate import ScheduleError, validate

__all__ = [
    "AUTO",
    "SCHEDULES",
    "Action",
    "ChunkCost",
    "Kind",
    "Schedule",
    "ScheduleError",
    "SchedulePlan",
    "Simulation",
    "Transfer",
    "build_schedule",
    "chunk_costs",
    "equal_costs",
    "find_best",
    "format_actions",
    "generate",
    "per_stage",
    "plan_schedule",
    "simulate",
    "validate",
]
