"""Templates of our own that use what public ones use, and requests that reach their corners."""

from typing import Any

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

SYSTEM_MERGE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system_message if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

TOOLS = """{%- if tools %}
<|im_start|>system
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>{{ tools | tojson(indent=2) }}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
<|im_start|>assistant{% if message.content %}

{{ message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}

<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
        {%- endfor %}<|im_end|>
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
<|im_start|>user
        {%- endif %}
<tool_response>
{{ message.content }}
</tool_response>
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
    {%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PARTS = """{% for message in messages %}<|{{ message['role'] }}|>
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}
    {%- endfor %}
{%- endif %}
<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

THINKING = """{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- if loop.index0 < ns.last_user %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
    {%- endif %}
    {%- if message.role == 'assistant' and message.reasoning_content is defined and message.reasoning_content %}
        {%- set content = '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' ~ content %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

DATES = """{{ bos_token }}{% if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
<|header|>system<|/header|>

Today Date: {{ date_string }}

{% for message in messages if message.role != 'system' %}<|header|>{{ message.role }}<|/header|>

{{ message.content | trim }}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|header|>assistant<|/header|>

{% endif %}"""

LOOP_CONTROLS = """{% macro line(role, text) -%}
[{{ role | upper }}] {{ text | replace('\t', ' ') }}
{%- endmacro %}
{% for message in messages %}
{% if message.role == 'developer' %}{% continue %}{% endif %}
{% if message.content == 'STOP' %}{% break %}{% endif %}
{{ line(message.role, message.content) }}
{% endfor %}
{% for key, value in {'a': 1, 'b': [1, 2.5, none, true]}.items() %}{{ key }}={{ value }};{% endfor %}
"""

GENERATION = """{% for message in messages %}
    {% if message.role == 'assistant' %}
<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}
    {% else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}
{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"""

DOCUMENTS = """{% if documents %}{% for document in documents %}
Document {{ loop.index }}: {{ document['title'] | default('untitled') }}: {{ document['text'] }}
{% endfor %}{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '\n' }}{% endfor %}"""

ROLES = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- set names = {'user': 'user', 'assistant': 'model', 'tool': 'user'} %}
{%- set state = namespace(open='', turns=0) %}
{%- for message in messages %}
    {%- set name = names.get(message['role'], message['role']) %}
    {%- if name != state.open %}
        {{- ('<end_of_turn>\n' if state.open else '') ~ '<start_of_turn>' ~ name ~ '\n' }}
        {%- set state.open = name %}
        {%- set state.turns = state.turns + 1 %}
    {%- endif %}
    {{- message['content'] | trim }}
{%- endfor %}
{{- '<end_of_turn>\n' }}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}{# turns: {{ state.turns }} #}"""

STEPS = """{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

SIGNATURES = """{%- macro kind(schema) -%}
    {%- if schema.type == 'array' -%}{{ kind(schema['items']) if schema['items'] else 'any' }}[]
    {%- elif schema.enum is defined -%}
        {%- for value in schema.enum -%}"{{ value }}"{{ ' | ' if not loop.last }}{%- endfor -%}
    {%- elif schema.type == 'object' -%}
        {%- set required = schema.required or [] -%}
        {
        {%- for name, inner in (schema.properties or {}).items() -%}
            {{ name }}{{ '' if name in required else '?' }}: {{ kind(inner) }}{{ ', ' if not loop.last }}
        {%- endfor -%}
        }
    {%- else -%}{{ {'integer': 'number', 'boolean': 'boolean'}.get(schema.type, schema.type) }}
    {%- endif -%}
{%- endmacro -%}
<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}

Reasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}<|end|>
{%- if tools %}<|start|>developer<|message|>
{%- for tool in tools %}
{%- set function = tool.function %}
// {{ function.description }}
type {{ function.name }} = ({{ '_: ' ~ kind(function.parameters) if function.parameters else '' }}) => any;
{% endfor %}<|end|>
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' ~ call.name ~ '<|message|>' ~ call.arguments | tojson ~ '<|call|>' }}
        {%- set last_tool = call.name %}
    {%- else %}
        {{- '<|start|>' ~ message.role ~ '<|message|>' ~ (message.content or '') ~ '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

TWICE = """{{ bos_token }}{% for message in messages %}
{{- bos_token ~ message.role ~ ': ' ~ message.content ~ eos_token }}
{% endfor %}{{ bos_token if add_generation_prompt }}"""

TEMPLATES = {
    "chatml": CHATML,
    "system_merge": SYSTEM_MERGE,
    "tools": TOOLS,
    "parts": PARTS,
    "thinking": THINKING,
    "dates": DATES,
    "loop_controls": LOOP_CONTROLS,
    "generation": GENERATION,
    "documents": DOCUMENTS,
    "roles": ROLES,
    "steps": STEPS,
    "signatures": SIGNATURES,
    "twice": TWICE,
}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <b>Orte</b> & mehr: 天気",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'}}

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": "  Hello <b>world</b>\n\n"}]},
    "turns": {
        "messages": [
            {"role": "system", "content": " Be brief. "},
            {"role": "user", "content": "Hi 👋"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
            {"role": "user", "content": [{"type": "text", "text": "And\tnow"}, {"type": "text", "text": "then?"}]},
        ],
    },
    "no_generation_prompt": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "because"}],
        "add_generation_prompt": False,
    },
    "continued": {
        "messages": [{"role": "user", "content": "Write."}, {"role": "assistant", "content": "Once upon a "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12 °C"}]},
            {"role": "tool", "tool_call_id": "c2", "content": "sunny"},
            {"role": "assistant", "content": "Fine."},
        ],
        "tools": [TOOL],
    },
    "variables": {
        "messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}],
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "1 Jan 2000"},
        "documents": [{"title": "T", "text": "body"}, {"text": "untitled body"}],
    },
}
