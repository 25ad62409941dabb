"""Small chat templates with the tool and reasoning formats of real model families."""

# Qwen 3: ChatML and Hermes' tags; reasoning is opened, and kept only for the last turn.
QWEN = """\
{%- if tools %}<|im_start|>system
# Tools
For each function call, return a json object within <tool_call></tool_call> XML tags:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined and thinking %}{{ '<think>\\n' }}{% endif %}
{%- if thinking is defined and not thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# Qwen 2.5: the same without reasoning.
HERMES = """\
{%- if tools %}<tools>{{ tools | tojson }}</tools> In <tool_call></tool_call> tags.{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("single calls only") }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == "tool" %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if tools and loop.first %}Respond in the format {"name": function name, "parameters": \
dictionary of argument name and its value}.
{{ tools | tojson }}
{% endif %}{{ message.content }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{%- for message in messages %}
{%- if message.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ message.content }}[/INST]
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have 9 characters") }}{% endif %}
{{- call.function | tojson }}{% endfor %}]</s>
{%- else %}{{ message.content }}</s>{% endif %}{% endfor %}"""

PYTHONIC = """\
{% if tools %}Answer [func_name1(params_name1=params_value1), func_name2(params)]. \
{{ tools }}{% endif %}
{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"""

# gpt-oss: Harmony's messages. Reasoning is shown only before calls whose turn has no answer yet.
# Like the published template, it takes one call per message and either content or reasoning.
HARMONY = """\
{%- macro type_of(schema) -%}
    {%- if schema.enum is defined -%}
        {{- '"' ~ schema.enum | join('" | "') ~ '"' -}}
    {%- elif schema.type == "array" -%}
        {{- type_of(schema["items"]) ~ "[]" -}}
    {%- elif schema.type == "object" and schema.properties -%}
        {{- "{\\n" }}
        {%- for name, property in schema.properties.items() %}
            {{- name ~ ("" if name in (schema.required or []) else "?") ~ ": " }}
            {{- type_of(property) ~ ",\\n" }}
        {%- endfor %}
        {{- "}" }}
    {%- else -%}
        {{- schema.type or "any" -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro show_tools(namespace_name, tools) -%}
    {{- "namespace " ~ namespace_name ~ " {\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " ~ tool.description ~ "\\ntype " ~ tool.name ~ " = (_: " }}
        {{- type_of(tool.parameters) ~ ") => any;\\n" }}
    {%- endfor %}
    {{- "}" }}
{%- endmacro -%}
{%- macro system_message() -%}
    {%- if model_identity is not defined %}
        {%- set model_identity = "You are a model." %}
    {%- endif %}
    {{- model_identity ~ "\\nDate: " ~ strftime_now("%Y-%m-%d") ~ "\\n" }}
    {{- "Reasoning: " ~ (reasoning_effort or "medium") ~ "\\n" }}
    {%- if builtin_tools %}
        {{- "Tools: " ~ builtin_tools | join(", ") ~ "\\n" }}
    {%- endif -%}
{%- endmacro -%}
<|start|>system<|message|>{{ system_message() }}<|end|>
{%- set turns = messages %}
{%- set instructions = "" %}
{%- if messages[0].role in ("developer", "system") %}
    {%- set instructions = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- if instructions or tools %}
    {{- "<|start|>developer<|message|>" ~ instructions }}
    {%- if tools %}{{ "\\n" ~ show_tools("functions", tools) }}{% endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- set answered = namespace(yes=false) %}
        {%- for later in turns[loop.index:] %}
            {%- if later.role == "assistant" and "tool_calls" not in later %}
                {%- set answered.yes = true %}
            {%- endif %}
        {%- endfor %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("content and thinking cannot both be set") }}
        {%- elif not answered.yes and (message.content or message.thinking) %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
            {{- (message.content or message.thinking) ~ "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." ~ call.name ~ "<|channel|>commentary json" }}
        {{- "<|message|>" ~ call.arguments | tojson ~ "<|call|>" }}
        {%- set called.name = call.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- set called.name = none %}
    {%- elif message.role == "tool" %}
        {%- if called.name is none %}{{ raise_exception("no call precedes the result") }}{% endif %}
        {{- "<|start|>functions." ~ called.name ~ " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson ~ "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
