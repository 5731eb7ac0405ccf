from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.hardware.machine import Gpu, GpuAttributes, Host
from gracetune.hardware.probe import choose_memory_mode, choose_profile, coherent_link

MAYBE = (True, False, None)
_maybe = st.sampled_from(MAYBE)

attributes = st.builds(
    GpuAttributes,
    managed_memory=_maybe,
    concurrent_managed_access=_maybe,
    pageable_memory_access=_maybe,
    pageable_uses_host_page_tables=_maybe,
    direct_managed_access_from_host=_maybe,
    host_native_atomic=_maybe,
    integrated=_maybe,
    can_map_host_memory=_maybe,
)
gpus = st.builds(
    Gpu,
    index=st.just(0),
    name=st.sampled_from(["NVIDIA GH200 480GB", "NVIDIA GB10", "NVIDIA H200", None]),
    attributes=attributes,
    is_numa_node=_maybe,
    numa_node=st.none() | st.integers(0, 8),
)
hosts = st.builds(
    Host,
    architecture=st.sampled_from(["aarch64", "x86_64", None]),
    coherent_memory_parameter=st.sampled_from(["driver", "numa", "", "nonsense", None]),
    user_numa_management=st.sampled_from([0, 1, None]),
)


@given(host=hosts, present=st.lists(gpus, max_size=3))
def test_every_machine_gets_one_profile_and_a_reason(host: Host, present: list[Gpu]) -> None:
    profile, mode = choose_profile(host, present), choose_memory_mode(host, present)
    assert profile == choose_profile(host, present)
    assert profile.reason.strip()
    assert mode.reason.strip()
    assert (profile.value == "cpu") == (not present) == (mode.value == "none")
    assert (profile.value == "integrated") == (mode.value == "integrated one-pool")
    if mode.value.startswith("coherent"):
        assert profile.value == "superchip"
    if profile.value == "superchip":
        assert mode.value in ("coherent NUMA", "coherent CDMM", "unknown")
    if mode.value == "discrete":
        assert profile.value == "discrete"


@given(host=hosts, gpu=gpus, name=st.text())
def test_the_products_name_decides_nothing(host: Host, gpu: Gpu, name: str) -> None:
    renamed = gpu.model_copy(update={"name": name})
    assert choose_profile(host, [gpu]) == choose_profile(host, [renamed])
    assert choose_memory_mode(host, [gpu]) == choose_memory_mode(host, [renamed])


@pytest.mark.parametrize(("integrated", "tables", "direct", "atomics"), list(product(MAYBE, repeat=4)))
def test_all_combinations_of_the_deciding_attributes(
    integrated: bool | None, tables: bool | None, direct: bool | None, atomics: bool | None
) -> None:
    found = GpuAttributes(
        integrated=integrated,
        pageable_uses_host_page_tables=tables,
        direct_managed_access_from_host=direct,
        host_native_atomic=atomics,
    )
    signs = [tables, direct, atomics]
    profile = choose_profile(Host(), [Gpu(index=0, attributes=found)])
    if integrated is True:
        assert profile.value == "integrated"
    elif integrated is False and True in signs:
        assert profile.value == "superchip"
    else:
        assert profile.value == "discrete"
    if profile.value == "discrete" and (integrated is None or None in signs):
        assert "does not say" in profile.reason
    assert coherent_link(found) is (True if True in signs else None if None in signs else False)


def _coherent(**facts: object) -> Gpu:
    return Gpu(index=0, attributes=GpuAttributes(integrated=False, host_native_atomic=True), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "gpu", "mode"),
    [
        (Host(), _coherent(is_numa_node=True, numa_node=1), "coherent NUMA"),
        (Host(), _coherent(is_numa_node=False), "coherent CDMM"),
        (Host(coherent_memory_parameter="driver"), _coherent(), "coherent CDMM"),
        (Host(coherent_memory_parameter="numa", user_numa_management=1), _coherent(), "coherent NUMA"),
        # Driver 615 and later: CDMM without any request for it.
        (Host(coherent_memory_parameter="", user_numa_management=0), _coherent(), "coherent CDMM"),
        (Host(coherent_memory_parameter="", user_numa_management=1), _coherent(), "unknown"),
        (Host(), _coherent(), "unknown"),
    ],
)
def test_numa_and_cdmm_are_told_apart(host: Host, gpu: Gpu, mode: str) -> None:
    assert choose_memory_mode(host, [gpu]).value == mode
    assert choose_profile(host, [gpu]).value == "superchip"


def test_the_first_gpu_decides() -> None:
    discrete = Gpu(
        index=1,
        attributes=GpuAttributes(
            integrated=False,
            host_native_atomic=False,
            pageable_uses_host_page_tables=False,
            direct_managed_access_from_host=False,
        ),
    )
    assert choose_profile(Host(), [_coherent(), discrete]).value == "superchip"
    assert choose_profile(Host(), [discrete, _coherent()]).value == "discrete"
