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
