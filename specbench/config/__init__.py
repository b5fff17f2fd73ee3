"""The configuration of a run: its parameters, the choices in conf/ and the code that each choice loads."""
