"""MegaSNN: training of spiking neural networks with data, context, tensor and pipeline parallelism.

The names below are imported at their first use. So `--help`, the planner and other parts without torch start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megasnn.common.version import VERSION as __version__

if TYPE_CHECKING:
    from megasnn.checkpoint.load import load_checkpoint as load_checkpoint
    from megasnn.checkpoint.load import load_global_tensors as load_global_tensors
    from megasnn.checkpoint.save import save_checkpoint as save_checkpoint
    from megasnn.checkpoint.save import save_global_tensors as save_global_tensors
    from megasnn.common.files import CheckpointError as CheckpointError
    from megasnn.config import ConfigError as ConfigError
    from megasnn.config import PretrainConfig as PretrainConfig
    from megasnn.config import parse as parse
    from megasnn.config import validate as validate
    from megasnn.engine import Engine as Engine
    from megasnn.export.trained_model import TrainedModel as TrainedModel
    from megasnn.export.trained_model import load_model as load_model
    from megasnn.kernels import NeuronSpec as NeuronSpec
    from megasnn.kernels.spike_codec import COUNTS as COUNTS
    from megasnn.kernels.spike_codec import DENSE as DENSE
    from megasnn.kernels.spike_codec import SPIKES as SPIKES
    from megasnn.kernels.spike_codec import TERNARY as TERNARY
    from megasnn.kernels.spike_codec import Content as Content
    from megasnn.layers import BuildContext as BuildContext
    from megasnn.layers import CausalAttention as CausalAttention
    from megasnn.layers import CausalSpikingAttention as CausalSpikingAttention
    from megasnn.layers import ConvNormNeuron as ConvNormNeuron
    from megasnn.layers import DropPath as DropPath
    from megasnn.layers import MaxPool as MaxPool
    from megasnn.layers import MeanLinear as MeanLinear
    from megasnn.layers import MeanOverSpace as MeanOverSpace
    from megasnn.layers import NeuronConvNorm as NeuronConvNorm
    from megasnn.layers import ParallelBatchNorm as ParallelBatchNorm
    from megasnn.layers import ParallelConv as ParallelConv
    from megasnn.layers import ParallelDropout as ParallelDropout
    from megasnn.layers import ParallelIF as ParallelIF
    from megasnn.layers import ParallelLIF as ParallelLIF
    from megasnn.layers import ParallelLinear as ParallelLinear
    from megasnn.layers import ParallelNeuron as ParallelNeuron
    from megasnn.layers import ParallelPLIF as ParallelPLIF
    from megasnn.layers import ParallelPSN as ParallelPSN
    from megasnn.layers import ParallelSlidingPSN as ParallelSlidingPSN
    from megasnn.layers import SpikeDrivenAttention as SpikeDrivenAttention
    from megasnn.layers import SpikingNeuron as SpikingNeuron
    from megasnn.layers import SpikingSelfAttention as SpikingSelfAttention
    from megasnn.layers import TokenAttention as TokenAttention
    from megasnn.layers import WholeImages as WholeImages
    from megasnn.layers.layer import layer as layer
    from megasnn.layers.plain.network import shard as shard
    from megasnn.layers.shape_inference import mark_spikes as mark_spikes
    from megasnn.models.arrays import ArraySpec as ArraySpec
    from megasnn.models.build import describe_model as describe_model
    from megasnn.models.description import LayerDescription as LayerDescription
    from megasnn.models.description import ModelDescription as ModelDescription
    from megasnn.models.model import Model as Model
    from megasnn.models.registry import MODELS as MODELS
    from megasnn.parallel.sharding import Shard as Shard
    from megasnn.parallel.sharding import ShardedTensor as ShardedTensor
    from megasnn.parallel_state import ParallelState as ParallelState
    from megasnn.parallel_state import destroy_model_parallel as destroy_model_parallel
    from megasnn.parallel_state import get_parallel_state as get_parallel_state
    from megasnn.parallel_state import initialize_model_parallel as initialize_model_parallel
    from megasnn.pipeline.chunk import PipelineChunk as PipelineChunk
    from megasnn.pretraining import pretrain as pretrain
    from megasnn.telemetry.callback import Callback as Callback
    from megasnn.telemetry.trackers import MLflow as MLflow
    from megasnn.telemetry.trackers import Trackio as Trackio
    from megasnn.telemetry.trackers import Wandb as Wandb
    from megasnn.training.engine_log import EngineLog as EngineLog

# Module -> names. The imports above are the same list for type checkers, which do not follow __getattr__.
_NAMES = {
    "megasnn.checkpoint.load": "load_checkpoint load_global_tensors",
    "megasnn.checkpoint.save": "save_checkpoint save_global_tensors",
    "megasnn.config": "ConfigError PretrainConfig parse validate",
    "megasnn.engine": "Engine",
    "megasnn.common.files": "CheckpointError",
    "megasnn.export.trained_model": "TrainedModel load_model",
    "megasnn.kernels": "NeuronSpec",
    "megasnn.kernels.spike_codec": "COUNTS DENSE SPIKES TERNARY Content",
    "megasnn.layers": (
        "BuildContext CausalAttention CausalSpikingAttention ConvNormNeuron DropPath MaxPool MeanLinear "
        "MeanOverSpace NeuronConvNorm "
        "ParallelBatchNorm ParallelConv ParallelDropout ParallelLinear "
        "ParallelIF ParallelLIF ParallelNeuron ParallelPLIF ParallelPSN ParallelSlidingPSN SpikeDrivenAttention "
        "SpikingNeuron SpikingSelfAttention TokenAttention WholeImages"
    ),
    "megasnn.layers.shape_inference": "mark_spikes",
    "megasnn.layers.plain.network": "shard",
    "megasnn.models.arrays": "ArraySpec",
    "megasnn.models.build": "describe_model",
    "megasnn.models.description": "LayerDescription ModelDescription",
    "megasnn.layers.layer": "layer",
    "megasnn.models.model": "Model",
    "megasnn.models.registry": "MODELS",
    "megasnn.parallel.sharding": "Shard ShardedTensor",
    "megasnn.parallel_state": "ParallelState destroy_model_parallel get_parallel_state initialize_model_parallel",
    "megasnn.pipeline.chunk": "PipelineChunk",
    "megasnn.pretraining": "pretrain",
    "megasnn.telemetry.callback": "Callback",
    "megasnn.telemetry.trackers": "MLflow Trackio Wandb",
    "megasnn.training.engine_log": "EngineLog",
}
_MODULES: dict[str, str] = {}
for _module, _names in _NAMES.items():
    _MODULES.update(dict.fromkeys(_names.split(), _module))
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    # Later uses find it without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
