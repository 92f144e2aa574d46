"""MARLaaS: many tenants RL-fine-tune one shared frozen base model at the same time."""

__version__ = "0.1.0"
