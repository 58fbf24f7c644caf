"""The LoRA room: reading adapters whole or refusing them by name, and keeping their versions."""
