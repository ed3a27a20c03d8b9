"""Log losses by place in other trainers: transformers' `Trainer` and OLMo-core's."""
