"""Starting compiled kernels without binding their arguments again, with a driver of a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.triton_code import AbsentGpu
from tests.kernels.triton_process import without_triton

pytestmark = without_triton


class CountingGpu(AbsentGpu):
    """Compiles kernels; a started one only leaves its arguments in `started`."""

    def __init__(self) -> None:
        super().__init__(capability=90)
        self.started: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**17},
            load_binary=lambda *binary: ("module", "function", 32, 0, 1024),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def start(x: int, y: int, z: int, stream: int, function: str, *args: Any) -> None:
            _packed, _metadata, _enter_hook, _exit_hook, *of_kernel = args
            assert function == "function"
            self.started.append((x, y, z, metadata.name, *of_kernel))

        return start


@pytest.fixture(scope="module")
def counting_gpu() -> CountingGpu:
    """One for all tests: Triton keeps compiled kernels, and these keep their launcher."""
    return CountingGpu()


@pytest.fixture
def gpu(counting_gpu) -> Iterator[CountingGpu]:
    from triton.runtime import driver

    counting_gpu.started.clear()
    with mock.patch.object(driver, "_active", counting_gpu):
        yield counting_gpu


@pytest.fixture
def by_triton() -> Iterator[mock.Mock]:
    """Counts the calls that Triton binds."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=run) as counted:
        yield counted


def make_launch() -> Any:
    from megasnn.kernels.triton.codec import unpack_bits_kernel
    from megasnn.kernels.triton.launch import Launch

    return Launch(unpack_bits_kernel, 3, 64, 16, 16, BLOCK=2048)


def test_a_started_kernel_is_started_again_without_triton(gpu, by_triton) -> None:
    launch = make_launch()
    packed, out = torch.zeros(8, dtype=torch.uint8), torch.zeros(4, 16)
    other = torch.ones(4, 16)
    for target in (out, other, out):
        launch(packed, target)
    assert by_triton.call_count == 1
    assert [len(each) for each in gpu.started] == [3 + 1 + 6] * 3
    first, second, third = gpu.started
    assert first[:4] == (3, 1, 1, "unpack_bits_kernel")
    assert first[6:] == second[6:] == (64, 16, 16, 2048)
    assert first[4] is second[4] is packed and first[5] is third[5] is out and second[5] is other


def test_tensors_of_another_kind_are_bound_by_triton(gpu, by_triton) -> None:
    launch = make_launch()
    packed, out = torch.zeros(16, dtype=torch.uint8), torch.zeros(4, 16)
    launch(packed, out)
    launch(packed, out.double())
    assert by_triton.call_count == 2, "another type"
    for _ in range(2):
        launch(packed[1:9], out)
    assert by_triton.call_count == 4, "an address that is no multiple of 16"
    launch(packed, out)
    launch(packed, out.double())
    assert by_triton.call_count == 4 and len(gpu.started) == 6


def test_a_missing_tensor_is_a_kind_of_its_own(gpu, by_triton) -> None:
    from megasnn.kernels.triton.codec import pack_bits_kernel
    from megasnn.kernels.triton.launch import Launch

    launch = Launch(pack_bits_kernel, 1, 64, BLOCK=2048)
    x, packed, strange = torch.zeros(64), torch.zeros(8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    for check in (None, strange, None, strange):
        launch(x, packed, check)
    assert by_triton.call_count == 2
    assert [each[6] for each in gpu.started] == [None, strange, None, strange]
