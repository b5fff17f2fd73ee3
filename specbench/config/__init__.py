"""The configuration of a run: its parameters, the choices under conf/ and what each choice loads."""
