"""packattn inside other libraries. Each module imports its library only when it is imported itself.

packattn.integrations.transformers   attn_implementation="packattn" for Hugging Face models
packattn.integrations.torchtitan     an inner attention over packed positions
packattn.integrations.olmo           an attention backend with intra-document masking
packattn.integrations.megatron       a core attention for THD batches
"""
