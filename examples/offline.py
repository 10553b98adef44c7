"""Generate in Python, and see what the experts did."""

from moestro import LLM, SamplingParams

llm = LLM("demo")
prompts = ["The capital of France is", "def fibonacci(n):"]
for result in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)):
    print(repr(result.text), result.finish_reason)

loads = llm.expert_loads()
print(f"{loads['tokens']} tokens went through each of {len(loads['layers'])} layers of {loads['num_experts']} experts")
print("layer", loads["layers"][0], "tokens an expert:", loads["loads"][0])
