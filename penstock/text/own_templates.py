"""Chat templates for checkpoints that are published without one.

DeepSeek V3.2 comes with a Python program that writes its prompts. The template here writes the same ones: functions in
the first system message, calls in DSML, results in XML, thoughts behind the last question only. As for V3.1, the model
thinks where it is told to (`enable_thinking` or `thinking`).
"""

from __future__ import annotations

_DEEPSEEK_V32 = """\
{%- set dsml = '｜DSML｜' -%}
{%- set thinks = thinking if thinking is defined else (enable_thinking is defined and enable_thinking) -%}

{%- macro functions() -%}
## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{{ dsml }}function_calls>" block like the following as part of your reply to \
the user:
<{{ dsml }}function_calls>
<{{ dsml }}invoke name="$FUNCTION_NAME">
<{{ dsml }}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{{ dsml }}parameter>
...
</{{ dsml }}invoke>
<{{ dsml }}invoke name="$FUNCTION_NAME2">
...
</{{ dsml }}invoke>
</{{ dsml }}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<{{ dsml }}function_calls>
...
</{{ dsml }}function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{% for tool in tools %}
{{ tool.function | tojson }}
{% endfor %}
</functions>{{ '\\n' }}
{%- endmacro -%}

{%- macro calls(message) -%}
{{ '\\n\\n<' ~ dsml ~ 'function_calls>\\n' }}
{%- for call in message.tool_calls -%}
  {{- '<' ~ dsml ~ 'invoke name="' ~ call.function.name ~ '">\\n' -}}
  {%- if call.function.arguments is mapping -%}
    {%- for key, value in call.function.arguments.items() -%}
      {{- '<' ~ dsml ~ 'parameter name="' ~ key ~ '" string="' -}}
      {%- if value is string -%}
        {{- 'true">' ~ value -}}
      {%- else -%}
        {{- 'false">' ~ (value | tojson) -}}
      {%- endif -%}
      {{- '</' ~ dsml ~ 'parameter>' -}}
      {%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
    {%- endfor -%}
  {%- else -%}
    {{- call.function.arguments -}}
  {%- endif -%}
  {{- '\\n</' ~ dsml ~ 'invoke>\\n' -}}
{%- endfor -%}
{{- '</' ~ dsml ~ 'function_calls>' -}}
{%- endmacro -%}

{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}

{{- bos_token -}}
{%- if tools and (not messages or messages[0].role != 'system') -%}
  {{- '\\n\\n' ~ functions() -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set answered = not loop.last or add_generation_prompt -%}
  {%- set think = thinks and loop.index0 >= ns.last_user -%}
  {%- if message.role == 'system' -%}
    {{- message.content -}}
    {%- if tools and loop.first -%}{{- '\\n\\n' ~ functions() -}}{%- endif -%}
  {%- elif message.role == 'user' -%}
    {{- '<｜User｜>' ~ message.content -}}
    {%- if answered -%}{{- '<｜Assistant｜>' ~ ('<think>' if think else '</think>') -}}{%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {%- if think -%}{{- (message.reasoning_content or '') ~ '</think>' -}}{%- endif -%}
    {{- message.content or '' -}}
    {%- if message.tool_calls -%}{{- calls(message) -}}{%- endif -%}
    {{- '<｜end▁of▁sentence｜>' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '\\n\\n<function_results>' -}}{%- endif -%}
    {{- '\\n<result>' ~ message.content ~ '</result>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}
      {{- '\\n</function_results>' -}}
      {%- if answered -%}{{- '\\n\\n' ~ ('<think>' if think else '</think>') -}}{%- endif -%}
    {%- endif -%}
  {%- else -%}
    {{- raise_exception('there is no role ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
"""
OWN_TEMPLATES: dict[str, str] = {"deepseek_v32": _DEEPSEEK_V32}
"""By `model_type`."""
