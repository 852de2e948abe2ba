"""Language models: modules, data, export and reinforcement learning."""
