"""What llama.cpp knows, as tables: its architectures, tensor types and file types.

Copied from llama.cpp 0c1e57098, the one inside llama-cpp-python 0.3.36, so that a model can be
judged before anything is loaded. `tests/test_llama_cpp_tables.py` compares them with the installed
library and fails when it is another version: then go through the sources named below again.
"""


def _names(text: str) -> list[str]:
    return text.split()


LLAMA_CPP_PYTHON_VERSION = "0.3.36"

LAYERS_MAX = 512
"""LLAMA_MAX_LAYERS, src/llama-hparams.h: one layer more aborts the process."""
EXPERTS_MAX = 1024
"""LLAMA_MAX_EXPERTS, likewise."""

TEXT_ARCHITECTURES = frozenset(
    _names("""
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom
    chameleon chatglm codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2
    deepseek2-ocr deepseek32 deepseek4 dots1 dots3note ernie4_5 ernie4_5-moe exaone exaone-moe
    exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe glm5-next
    gpt-oss gpt2 gptneox granite granite_swa granitehybrid granitemoe graniteswitch grok grovemoe
    hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba kimi-k3
    kimi-linear laguna lfm2 lfm2moe llama llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm
    minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 mpt muse-glimmer nanbeige nemotron
    nemotron_h nemotron_h_moe olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3
    phimoe plamo plamo2 plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe
    qwen3next qwen3vl qwen3vlmoe qwen4exp refact rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker
    smollm3 spark2_5 stablelm starcoder starcoder2 step35 talkie xverse
    """)
)
"""Architectures that produce text token by token.

From LLM_ARCH_NAMES (src/llama-arch.cpp) as far as llama_model_mapping (src/llama-model.cpp) has a
model for the name, without those in `OTHER_ARCHITECTURES`.
"""

_ENCODER = "an encoder for embeddings, which produces no text"
_DIFFUSION = "a diffusion model, which does not produce text token by token"
_DRAFT = "a draft head for speculative decoding, which cannot stand alone"
_SPEECH = "a speech model, which produces no text"

OTHER_ARCHITECTURES = {
    **dict.fromkeys(
        _names("""
        bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert
        nomic-bert nomic-bert-moe t5encoder
        """),
        _ENCODER,
    ),
    **dict.fromkeys(_names("dream llada llada-moe rnd1"), _DIFFUSION),
    **dict.fromkeys(_names("dflash eagle3 gemma4-assistant"), _DRAFT),
    **dict.fromkeys(_names("pockettts qwen3tts wavtokenizer-dec"), _SPEECH),
    "clip": "a projector (mmproj) for images or audio, which belongs beside a text model",
    "t5": "an encoder-decoder model, which this server cannot run",
}
"""Architectures llama.cpp has and this server refuses, and what they are."""

RECURRENT = frozenset(_names("arwkv7 mamba mamba2 rwkv6 rwkv6qwen2 rwkv7"))
"""llm_arch_is_recurrent, src/llama-arch.cpp."""

HYBRID = frozenset(
    _names("""
    bailingmoe3 deepseek4 falcon-h1 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe
    minimax-01 nemotron_h nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next qwen4exp
    """)
)
"""llm_arch_is_hybrid, src/llama-arch.cpp."""

HYBRID_INTERVAL = {"minimax-01": 8, "qwen35": 4, "qwen35moe": 4, "qwen3next": 4, "qwen4exp": 4}
"""Hybrids in which every n-th layer attends, and the default n; src/models/*.cpp.

In the others the layers without KV heads are the recurrent ones; in falcon-h1 every layer is both.
"""

SLIDING_WINDOW = frozenset(
    _names("""
    afmoe cohere2 cohere2moe dots3note exaone-moe exaone4 gemma2 gemma3 gemma3n gemma4 gpt-oss
    granite_swa laguna llama4 maple mellum mimo2 muse-glimmer olmo2 plamo3 smallthinker spark2_5
    step35
    """)
)
"""Architectures that set swa_type (src/models/*.cpp) if the file names a window; others ignore it.

llama4 attends in chunks unless the file names a window of 0.
"""

TENSOR_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
    42: ("q2_0", 64, 18),
}
"""ggml_type: name, elements per block, bytes per block. type_traits in ggml/src/ggml.c."""

REPACKED_TYPES = frozenset(
    _names("f16 bf16 iq4_nl iq4_xs mxfp4 q1_0 q2_K q4_0 q4_1 q4_K q5_K q6_K q8_0")
)
"""Types that some CPU (AVX, AMX, ARM) keeps in a layout of its own for matrix products.

From ggml/src/ggml-cpu/repack.cpp and ggml/src/ggml-cpu/amx/.
"""

FILE_TYPES = dict(
    enumerate(
        _names("""
        F32 F16 Q4_0 Q4_1 . . . Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S
        Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M
        IQ4_XS IQ1_M BF16 . . . TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0
        """)
    )
)
"""general.file_type: names of quantizations. llama_ftype in include/llama.h; `.` is unused."""
