"""The launch: the policy's choice, a plan that is ready to be launched, memory that launches share, compiling ahead."""
