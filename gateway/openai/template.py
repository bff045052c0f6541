"""Chat templates: a conversation to the text the model was trained to continue.

The template comes out of the GGUF and is a program in Jinja2, run in a sandbox and offered what
Transformers offers. It is compiled once. Knows no token and no HTTP.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Never

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHATML = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools %}<|im_start|>system
{{ system }}
{%- if tools %}
{{- '\\n\\n' if system }}# Tools

You may call one or more of these functions; their signatures are in <tools></tools>:
<tools>
{%- for tool in tools %}
{{ '\\n' + tool | tojson }}
{%- endfor %}

</tools>

For each call return a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <arguments-object>}
</tool_call>
{%- endif %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response>
{%- else %}<|im_start|>{{ message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
{{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""For models that bring no template, with the tool calls that `gateway.openai.tools` reads."""


class TemplateInvalidError(Exception):
    """The model's template is not valid Jinja2. The server cannot serve chats with it."""


class TemplateRefusedError(Exception):
    """The template does not accept this conversation; the message may be shown to the client."""


class ChatTemplate:
    """A compiled chat template, and a second one where the model has its own for tools."""

    def __init__(
        self,
        source: str | None,
        *,
        bos: str,
        eos: str,
        tool_source: str | None = None,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        environment = _environment(now or _local_time)
        self._plain = _compile(environment, source or CHATML)
        self._tools = _compile(environment, tool_source) if tool_source else self._plain
        self._texts = {"bos_token": bos, "eos_token": eos}
        self.takes_tools = _mentions_tools(environment, tool_source or source or CHATML)
        """False: the model has not been trained to call tools."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Return the text the model is to continue. `variables` are the template's own."""
        template = self._tools if tools else self._plain
        given = {"messages": messages, "tools": tools or None}
        defaults = self._texts | {"add_generation_prompt": True}
        try:
            return template.render({**defaults, **variables, **given})
        except jinja2.TemplateError as error:
            raise TemplateRefusedError(str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            message = f"{type(error).__name__}: {error}"
            raise TemplateRefusedError(message) from error
        except RecursionError as error:
            message = "it is nested too deeply"
            raise TemplateRefusedError(message) from error


class _Generation(Extension):
    """`{% generation %}` marks what to train on; here its content simply passes through."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _compile(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        message = f"line {error.lineno} of the chat template: {error.message}"
        raise TemplateInvalidError(message) from error


def _mentions_tools(environment: ImmutableSandboxedEnvironment, source: str) -> bool:
    return "tools" in meta.find_undeclared_variables(environment.parse(source))


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature templates rely on
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """As Transformers has it: Jinja's own escapes HTML and sorts the keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> Never:
    raise TemplateRefusedError(message)


def _local_time() -> datetime:
    return datetime.now().astimezone()
