"""Pipeline schedules as data: generated, completed by passes, validated, simulated and executed."""

from megasnn.schedule.actions import Action as Action
from megasnn.schedule.actions import Kind as Kind
from megasnn.schedule.actions import Schedule as Schedule
from megasnn.schedule.actions import format_actions as format_actions
from megasnn.schedule.costs import ChunkCost as ChunkCost
from megasnn.schedule.costs import chunk_costs as chunk_costs
from megasnn.schedule.named import AUTO_SCHEDULE as AUTO_SCHEDULE
from megasnn.schedule.named import SCHEDULES as SCHEDULES
from megasnn.schedule.named import equal_costs as equal_costs
from megasnn.schedule.named import find_best as find_best
from megasnn.schedule.plan import ScheduleChoice as ScheduleChoice
from megasnn.schedule.plan import generate as generate
from megasnn.schedule.plan import plan_schedule as plan_schedule
from megasnn.schedule.simulate import Simulation as Simulation
from megasnn.schedule.simulate import simulate as simulate
from megasnn.schedule.validate import ScheduleError as ScheduleError
from megasnn.schedule.validate import validate_schedule as validate_schedule
