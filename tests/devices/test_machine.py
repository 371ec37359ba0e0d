"""`detect`: the card that NVML tells of, else the CPU; and the CPU's rates and their cache."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from msgspec.structs import replace

from oomph.devices import cpu_rates as rates
from oomph.devices import detect, find, machine
from oomph.devices.cpu_rates import measure, waited_s, waits_s
from oomph.devices.machine import read_cpu, usable_threads


class NoDriverError(Exception):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, cards: list[tuple[str, int]], driver: bool = True) -> None:
    """A pynvml that sees these (name, MiB) cards."""
    nvml = ModuleType("pynvml")

    def init() -> None:
        if not driver:
            raise NoDriverError

    def by_index(index: int) -> int:
        if index >= len(cards):
            raise NoDriverError
        return index

    functions = {
        "NVMLError": NoDriverError,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetName": lambda handle: cards[handle][0],
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=cards[handle][1] * 2**20),
        "nvmlDeviceGetCudaComputeCapability": lambda _: (7, 5),
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 123_000,
    }
    for name, function in functions.items():
        setattr(nvml, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OOMPH_MEASURE")
    return tmp_path / "cache"


def test_the_card_in_the_machine_is_found_with_its_real_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [("NVIDIA GeForce RTX 3080", 12288)])
    device = detect()
    assert (device.name, device.memory_mib) == ("GeForce RTX 3080 12GB", 12288)
    assert device.tflops_bf16 == find("3080 12gb").tflops_bf16


def test_the_index_and_cuda_visible_devices_choose_among_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [("Tesla T4", 15360), ("NVIDIA L4", 23034)])
    assert detect("cuda:1").name == "L4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert detect("cuda").name == "L4"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_cards_that_cuda_visible_devices_hides_are_not_found(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    fake_nvml(monkeypatch, [("Tesla T4", 15360)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert detect("cuda", measure=False).kind == "cpu"


def test_a_card_outside_the_catalogue_is_what_the_driver_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [("NVIDIA T1000", 8192)])
    device = detect()
    assert (device.name, device.memory_mib, device.watts, device.has_bf16) == ("NVIDIA T1000", 8192, 123, False)
    assert device.peak_tflops("float16") is None


def test_without_a_driver_the_device_is_the_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [], driver=False)
    device = detect("cuda", measure=False)
    assert (device.kind, device.context_mib) == ("cpu", 0)
    assert "No NVIDIA GPU" in device.notes[0]
    assert 0 < device.usable_mib <= device.memory_mib


def test_without_a_card_of_that_index_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [("Tesla T4", 15360)])
    assert detect("cuda:3", measure=False).kind == "cpu"


def test_without_torch_the_cpu_has_no_rates_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomph.devices.machine.torch_version", lambda: None)
    monkeypatch.setattr("oomph.devices.cpu_rates.torch_version", lambda: None)
    device = detect("cpu")
    assert device.tflops_fp32 is None and device.bandwidth_gbs is None
    assert "oomph[train]" in device.notes[0]


def test_the_environment_can_forbid_measuring(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setenv("OOMPH_MEASURE", "0")
    assert detect("cpu").tflops_fp32 is None
    assert not own_cache.exists()


@pytest.mark.slow
def test_measured_rates_are_kept_and_a_broken_file_is_replaced(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "BUSY", 100.0)  # whatever runs beside the tests
    kept = own_cache / "oomph" / "cpu.json"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b'{"half a fi\xff')
    device = detect("cpu")  # measures, in a process of its own
    assert device.tflops_fp32 and device.bandwidth_gbs
    [entry] = json.loads(kept.read_text()).values()
    assert entry["tflops_fp32"] == device.tflops_fp32
    assert detect("cpu", measure=False).tflops_fp32 == device.tflops_fp32


def test_rates_of_a_busy_machine_are_said_to_be_and_not_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = rates.CpuRates(0.1, 0.02, 10.0, 50.0, 9.0, 5e-10, 2e-6, 2e-9, 1e-9, 7e-9, waited=0.4)
    monkeypatch.setattr(rates, "_measure", lambda: measured)
    device = detect("cpu")
    assert device.tflops_fp32 == 0.1
    assert any("40%" in note for note in device.notes)
    assert not own_cache.exists()
    monkeypatch.setattr(rates, "_measure", lambda: replace(measured, waited=0.05))
    assert not detect("cpu").notes
    assert (own_cache / "oomph" / "cpu.json").exists()


def test_what_waits_for_the_cpu_is_counted() -> None:
    before = {**waits_s(), "a thread of before": 1.0}
    assert before.keys() > {str(os.getpid())}
    assert 0 <= waited_s(before) < 60
    assert waited_s({thread: seconds - 2 for thread, seconds in before.items()}) >= 2


def test_an_unwritable_cache_only_means_measuring_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measured = rates.CpuRates(0.1, 0.02, 10.0, 50.0, 9.0, 5e-10, 2e-6, 2e-9, 1e-9, 7e-9)
    monkeypatch.setattr(rates, "_measure", lambda: measured)
    assert rates.cpu_rates("a CPU", 2) == measured


@pytest.mark.parametrize(("used", "shared"), [(0, False), (1, False), (20, True)])
def test_a_cpu_is_shared_if_others_use_it_now(monkeypatch: pytest.MonkeyPatch, used: int, shared: bool) -> None:
    ticks = iter([{"cpu0": (500, 1000), "cpu1": (0, 1000)}, {"cpu0": (500 + used, 1020), "cpu1": (0, 1020)}])
    monkeypatch.setattr(rates, "_cpu_ticks", lambda: next(ticks))
    assert rates.is_shared(0.0) == shared


def test_threads_sleep_unless_the_user_said_otherwise() -> None:
    environment = {"OMP_WAIT_POLICY": "ACTIVE"}
    rates.let_threads_sleep(environment)
    assert environment == {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "0"}


def test_measuring_that_fails_leaves_the_rates_unknown(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert rates.cpu_rates("a CPU", 2) is None
    assert not own_cache.exists()


def test_bfloat16_is_measured_with_and_without_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon computes in it whatever the CPU: float32's rate would promise too much."""
    found = measure(budget_s=0.01)
    assert found["tflops_bf16"] and found["tflops_fp32"] and found["copy_gbs"]
    measured = rates.CpuRates(0.1, 0.02, 10.0, 50.0, 9.0, 5e-10, 2e-6, 2e-9, 1e-9, 7e-9)
    monkeypatch.setattr(machine, "cpu_rates", lambda *_: measured)
    for has_bf16 in (True, False):
        monkeypatch.setattr(machine, "read_cpu", lambda has=has_bf16: machine.Cpu("a CPU", 1, 1000, 900, has))
        assert detect("cpu").peak_tflops("bfloat16") == 0.02


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


LINUX = {
    "proc/cpuinfo": "processor : 0\nmodel name : Some  CPU\nflags : fpu avx512_bf16\n\nmodel name : Other\n",
    "proc/meminfo": "MemTotal:       16384000 kB\nMemFree: 100 kB\nMemAvailable:    8192000 kB\n",
}


def test_the_cpu_is_read_from_proc(tmp_path: Path) -> None:
    cpu = read_cpu(tree(tmp_path, LINUX), "linux")
    assert (cpu.name, cpu.memory_mib, cpu.available_mib, cpu.has_bf16) == ("Some CPU", 16000, 8000, True)


def test_a_containers_memory_limit_counts_in_version_2(tmp_path: Path) -> None:
    limit = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": str(2**30),
        "sys/fs/cgroup/job/memory.current": str(2**28),
    }
    cpu = read_cpu(tree(tmp_path, {**LINUX, **limit}), "linux")
    assert (cpu.memory_mib, cpu.available_mib) == (1024, 768)


def test_a_containers_memory_limit_counts_in_version_1_and_none_is_none(tmp_path: Path) -> None:
    limit = {
        "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2**31),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "0",
    }
    assert read_cpu(tree(tmp_path, {**LINUX, **limit}), "linux").memory_mib == 2048


def test_a_cpu_quota_limits_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert usable_threads(tmp_path) == 16
    assert usable_threads(tree(tmp_path, {"sys/fs/cgroup/cpu.max": "350000 100000\n"})) == 4


def test_omp_num_threads_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert usable_threads(tmp_path) == 3


def test_a_machine_that_tells_nothing_still_has_a_cpu(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path, "linux")
    assert cpu.name and cpu.threads >= 1 and cpu.memory_mib == 0
