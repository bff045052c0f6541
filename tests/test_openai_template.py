"""Chat templates are rendered as the models were trained, and can do nothing else."""

from datetime import UTC, datetime

import pytest

from gateway.openai.template import ChatTemplate, TemplateInvalidError, TemplateRefusedError

USER = {"role": "user", "content": "<hi> é"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def template(source: str | None, tool_source: str | None = None) -> ChatTemplate:
    return ChatTemplate(
        source,
        bos="<s>",
        eos="</s>",
        tool_source=tool_source,
        now=lambda: datetime(2026, 7, 1, tzinfo=UTC),
    )


def test_a_model_without_template_gets_chatml() -> None:
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\n<hi> é<|im_end|>\n<|im_start|>assistant\n"
    )
    assert expected == template(None).render([{"role": "system", "content": "Be kind."}, USER])


def test_chatml_renders_a_call_as_the_model_wrote_it() -> None:
    """Otherwise the conversation's KV cache would be lost at the first tool call."""
    call = {"type": "function", "function": {"name": "find", "arguments": {"q": "é"}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    text = template(None).render([USER, answer, {"role": "tool", "content": "42"}], [TOOL])
    written = '<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n" in text
    assert "<tool_response>\n42\n</tool_response>" in text
    assert '\n{"type": "function", "function": {"name": "find"' in text


def test_blocks_leave_no_blank_lines() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert "a\nb\n" == template(source).render([{"content": "a"}, {"content": "b"}])


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}{{ strftime_now('%Y') }}{{ messages[0] | tojson }}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}kept{% endgeneration %}{{ thinking }}{{ add_generation_prompt }}"
    )
    expected = '<s></s>2026{"role": "user", "content": "<hi> é"}1keptoffTrue'
    assert expected == template(source).render([USER], variables={"thinking": "off", "messages": 1})


def test_raise_exception_refuses_the_conversation_in_the_templates_words() -> None:
    with pytest.raises(TemplateRefusedError, match="no system messages"):
        template("{{ raise_exception('no system messages') }}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].missing.more }}",
        "{{ 1 / 0 }}",
        "{% for i in 5 %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefusedError):
        template(source).render([USER])


def test_a_broken_template_is_found_when_it_is_loaded() -> None:
    with pytest.raises(TemplateInvalidError, match="line 2"):
        template("fine\n{% if %}")


def test_a_template_for_tools_is_used_only_with_tools() -> None:
    two = template("plain", tool_source="{{ tools | length }} tools")
    assert "plain" == two.render([USER])
    assert "1 tools" == two.render([USER], [TOOL])


def test_it_is_known_whether_a_model_takes_tools() -> None:
    assert template(None).takes_tools
    assert not template("{{ messages[0].content }}").takes_tools
