"""What the tests of tool-call formats share: byte-level tokenizers, minimal templates, random schemas and arguments."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ferrule_runtime.constrain import Constraint, Vocabulary
from ferrule_runtime.dialects import load_dialect
from ferrule_runtime.messages import Call
from ferrule_runtime.talk import Talk
from ferrule_runtime.tokenizer import Tokenizer as Ours
from ferrule_runtime.tools import Tool

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
GEMMA = ("<eos>", "<start_of_turn>", "<end_of_turn>", "<start_function_response>", "<end_function_response>")
GEMMA_TAGS = ("<start_function_call>", "<end_function_call>", "<escape>")

HERMES_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|im_start|>system\\n' + system + '<tools>' }}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls %}
{%- if not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# As Qwen3.5's: tools first, thoughts emptied, a user turn demanded, results merged into one user turn.
XML_TEMPLATE = """\
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nWrite <function=NAME>.' }}
{%- if messages[0].role == 'system' %}{{- '\\n\\n' + messages[0].content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- set asked = namespace(user=false) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.user = true %}{% endif %}{% endfor %}
{%- if not asked.user %}{{- raise_exception('No user query found.') }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{%- if not loop.first %}{{- '\\n' }}{% elif message.content %}{{- '\\n\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\\n' }}
{%- if value is mapping or (value is sequence and value is not string) %}{{- value | tojson }}
{%- else %}{{- value | string }}{% endif %}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n') }}
{%- endif %}
"""

GEMMA_TEMPLATE = """\
{%- macro write(value) %}
{%- if value is string %}{{- '<escape>' + value + '<escape>' }}
{%- elif value is boolean %}{{- 'true' if value else 'false' }}
{%- elif value is mapping %}{{- '{' }}
{%- for key, item in value | dictsort %}{{- key + ':' }}{{- write(item) }}{{- ',' if not loop.last }}{% endfor %}
{{- '}' }}
{%- elif value is sequence %}{{- '[' }}
{%- for item in value %}{{- write(item) }}{{- ',' if not loop.last }}{% endfor %}{{- ']' }}
{%- else %}{{- value }}{% endif %}
{%- endmacro %}
{%- set state = namespace(calls=false) %}
{%- for message in messages %}
{%- if message.role == 'developer' %}
{{- '<start_of_turn>developer\\n' + message.content }}
{%- for tool in tools or [] %}{{- 'declaration:' + tool.function.name + write(tool.function.parameters) }}{% endfor %}
{{- '<end_of_turn>\\n' }}
{%- elif message.role == 'user' %}
{{- '<start_of_turn>user\\n' + message.content + '<end_of_turn>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<start_of_turn>model\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '<start_function_call>call:' + call.function.name }}{{- write(call.function.arguments) }}
{{- '<end_function_call>' }}
{%- endfor %}
{{- '' if message.tool_calls else '<end_of_turn>\\n' }}
{%- if message.tool_calls and loop.last %}{{- '<start_function_response>' }}{% endif %}
{%- set state.calls = true %}
{%- else %}
{%- for item in message.content %}
{{- '<start_function_response>response:' + item.name }}{{- write(item.response) }}{{- '<end_function_response>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<start_of_turn>model\\n' }}{% endif %}
"""

TEMPLATES = {"hermes-json": HERMES_TEMPLATE, "qwen-xml": XML_TEMPLATE, "functiongemma": GEMMA_TEMPLATE}


def tokenizer_json(special: Sequence[str], plain: Sequence[str] = ()) -> str:
    """Return a byte-level tokenizer without merges; `plain` tokens are added ones without the flag, as Qwen's tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return str(made.to_str())


def make_talk(folder: Path, dialect: str, special: Sequence[str], plain: Sequence[str] = ()) -> Talk:
    """Return a dialect with its minimal template and a byte-level tokenizer of these control tokens."""
    path = folder / "tokenizer.json"
    path.write_text(tokenizer_json(special, plain), encoding="utf-8")
    rules, tokenizer = load_dialect(dialect), Ours(path)
    stops = {tokenizer.id_of(stop) for stop in rules.STOPS} - {None}
    template = rules.TEMPLATE or TEMPLATES[dialect]
    return Talk(rules, template, tokenizer, frozenset(stop for stop in stops if stop is not None))


def tool(name: str, properties: dict[str, Any], required: Sequence[str] | None = None, **more: Any) -> Tool:
    needed = list(properties) if required is None else list(required)
    schema = {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}
    return Tool(name, f"Does {name}.", schema, lambda **_: "")


def exact(call: Call) -> str:
    """Write a call so that 1, 1.0, True and "1" differ."""
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, sort_keys=True)


def walk(talk: Talk, tools: Sequence[Tool], seed: int, most: int = 3000) -> str:
    """Say what random logits and the grammar of a call lead to, greedily."""
    vocabulary = Vocabulary(talk.tokenizer, talk.tokenizer.size, min(talk.stops))
    grammar = talk.grammar(tools, "call")
    assert grammar is not None
    constraint, rng, said = Constraint(vocabulary, grammar), np.random.default_rng(seed), []
    while not constraint.done:
        assert len(said) < most, talk.written(said)
        ids = constraint.allowed()
        said.append(int(ids[rng.standard_normal(vocabulary.rows)[ids].argmax()]))
        constraint.accept(said[-1:])
    return talk.written([token for token in said if token not in talk.stops])


def accepted(talk: Talk, tools: Sequence[Tool], text: str) -> bool:
    """Tell whether the grammar of a call takes a text, whole."""
    vocabulary = Vocabulary(talk.tokenizer, talk.tokenizer.size, min(talk.stops))
    grammar = talk.grammar(tools, "call")
    assert grammar is not None
    constraint = Constraint(vocabulary, grammar)
    for token in talk.tokenizer.encode(text):
        if token not in constraint.allowed():
            return False
        constraint.accept([token])
    return constraint.done


_NAMES = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True)
# The constraint of a JSON string leaves DEL out, although JSON has it.
_LETTERS = st.one_of(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), st.sampled_from('<>{}[]":,=/\\\n\t ')
)
TEXTS = st.text(_LETTERS, max_size=12).filter(lambda text: "</parameter>" not in text and "<escape>" not in text)
_ENUMS = st.lists(st.from_regex(r"[a-z]{1,5}", fullmatch=True), min_size=1, max_size=3, unique=True)
_SCALARS = st.one_of(
    st.just({"type": "string", "maxLength": 12}),
    st.just({"type": "integer"}),
    st.just({"type": "number"}),
    st.just({"type": "boolean"}),
    _ENUMS.map(lambda values: {"type": "string", "enum": values}),
)
_LISTS = _SCALARS.map(lambda item: {"type": "array", "items": item, "maxItems": 3})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = st.one_of(_SCALARS, _LISTS, st.dictionaries(_NAMES, _SCALARS, min_size=1, max_size=2).map(_object))


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that fit a schema."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if kind == "array":
        return st.lists(values(schema["items"]), max_size=3)
    if kind == "object":
        members = {name: values(inner) for name, inner in schema["properties"].items()}
        # In the schema's order, as a constraint wants JSON; the strategy draws them in any.
        return st.fixed_dictionaries(members).map(lambda drawn: {name: drawn[name] for name in members})
    simple = {
        "string": TEXTS,
        "integer": st.integers(-(10**12), 10**12),
        "number": st.floats(-1e300, 1e300),
        "boolean": st.booleans(),
    }
    return simple[kind]


@st.composite
def tools_and_calls(draw: st.DrawFn) -> tuple[list[Tool], tuple[Call, ...]]:
    """Return random tools and calls of them, every argument given."""
    made = [
        tool(f"tool_{index}", draw(st.dictionaries(_NAMES, SCHEMAS, max_size=3)))
        for index in range(draw(st.integers(1, 2)))
    ]
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.sampled_from(made))
        arguments = {name: draw(values(schema)) for name, schema in chosen.parameters["properties"].items()}
        calls.append(Call(chosen.name, arguments))
    return made, tuple(calls)
