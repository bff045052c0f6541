"""What the layers of a model cache, for the architectures that have their own ways."""

from pathlib import Path

import pytest

from replica.cache_shape import CacheShape
from replica.gguf_file import read_gguf
from tests.gguf_samples import Shape, tiny_recurrent, write_model

Facts = dict[str, int | str | bool | list[int] | list[bool]]


def cache_of(path: Path, shape: Shape, **facts: int | list[int] | list[bool]) -> CacheShape:
    """Read the cache of a model with further facts in its metadata; `__` stands for a dot."""
    named: Facts = {
        f"{shape.architecture}.{name.replace('__', '.')}": value for name, value in facts.items()
    }
    return read_gguf(write_model(path / "model.gguf", shape, metadata=named)).cache


def test_every_layer_of_a_plain_model_attends(tmp_path: Path) -> None:
    assert CacheShape((64, 64), (64, 64), 0, 0, 0) == cache_of(tmp_path, Shape())


def test_layers_may_differ_in_their_kv_heads(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, Shape("deci", layers=3), attention__head_count_kv=[4, 0, 1])
    assert ((128, 0, 32), (128, 0, 32)) == (cache.key_widths, cache.value_widths)


def test_layers_with_a_window_may_have_other_heads(tmp_path: Path) -> None:
    """As in gemma4, which says for each layer whether it slides; else the wider is assumed."""
    shape = Shape("gemma4", layers=2, sliding_window=64)
    widths = {"attention__key_length_swa": 16, "attention__value_length_swa": 8}
    assert ((64, 64), (64, 64)) == both(cache_of(tmp_path, shape, **widths))
    pattern = {"attention__sliding_window_pattern": [True, False]}
    assert ((32, 64), (16, 64)) == both(cache_of(tmp_path, shape, **widths, **pattern))


def both(cache: CacheShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return cache.key_widths, cache.value_widths


def test_layers_that_share_keep_nothing(tmp_path: Path) -> None:
    shape = Shape("gemma3n", layers=5, sliding_window=64)
    assert (64, 64, 64) == cache_of(tmp_path, shape, attention__shared_kv_layers=2).key_widths


def test_a_head_for_drafting_has_no_place_in_the_context(tmp_path: Path) -> None:
    shape = Shape("glm4moe", layers=3)
    assert (64, 64) == cache_of(tmp_path, shape, nextn_predict_layers=1).key_widths


def test_mla_stores_no_values(tmp_path: Path) -> None:
    shape = Shape("deepseek2", kv_heads=1, head_width=36)
    mla = {"attention__key_length_mla": 24, "attention__value_length_mla": 16}
    assert ((36, 36), (0, 0)) == both(cache_of(tmp_path, shape, **mla))


def test_an_indexer_has_keys_of_its_own(tmp_path: Path) -> None:
    shape = Shape("deepseek32", kv_heads=1, head_width=36)
    assert (46, 46) == cache_of(tmp_path, shape, attention__indexer__key_length=10).key_widths


def test_a_recurrent_model_has_a_state_and_no_cache(tmp_path: Path) -> None:
    """Per layer 16 x 256 of state, and 3 x 256 of convolution."""
    cache = read_gguf(tiny_recurrent(tmp_path / "mamba.gguf")).cache
    assert CacheShape((), (), 2 * (16 * 256 + 3 * 256), 2, 256) == cache


SSM = {"ssm__inner_size": 256, "ssm__state_size": 16, "ssm__conv_kernel": 4, "ssm__group_count": 2}
SSM_STATE = 16 * 256 + 3 * (256 + 2 * 2 * 16)


@pytest.mark.parametrize(
    ("architecture", "facts", "attending", "recurrent"),
    [
        ("qwen3next", {}, 2, 6),
        ("qwen3next", {"full_attention_interval": 3}, 2, 6),
        ("qwen35", {"attention__recurrent_layers": [True] * 7 + [False]}, 1, 7),
        ("jamba", {"attention__head_count_kv": [0, 0, 0, 2, 0, 0, 0, 2]}, 2, 6),
        ("falcon-h1", {}, 8, 8),
    ],
)
def test_a_hybrid_attends_in_some_layers(
    tmp_path: Path,
    architecture: str,
    facts: dict[str, int | list[int] | list[bool]],
    attending: int,
    recurrent: int,
) -> None:
    cache = cache_of(tmp_path, Shape(architecture, layers=8), **SSM, **facts)
    assert (64,) * attending == cache.key_widths
    assert (recurrent, recurrent * SSM_STATE) == (cache.state_layers, cache.state_elements)


def test_states_of_other_designs(tmp_path: Path) -> None:
    """From n_embd_r and n_embd_s of llama.cpp: RWKV, LFM2, Kimi's delta attention, MiniMax."""
    rwkv = cache_of(tmp_path, Shape("rwkv7"), wkv__head_size=32)
    assert 2 * (2 * 128 + 32 * 128) == rwkv.state_elements
    lfm2 = cache_of(tmp_path, Shape("lfm2"), shortconv__l_cache=3, attention__head_count_kv=[0, 2])
    assert lfm2.state_elements == 2 * 128
    kimi = cache_of(
        tmp_path,
        Shape("kimi-linear"),
        kda__head_dim=32,
        ssm__conv_kernel=4,
        attention__head_count_kv=[0, 2],
    )
    assert 3 * 3 * 4 * 32 + 4 * 32 * 32 == kimi.state_elements
    minimax = cache_of(tmp_path, Shape("minimax-01", layers=8))
    assert 7 * 4 * 32 * 32 == minimax.state_elements
