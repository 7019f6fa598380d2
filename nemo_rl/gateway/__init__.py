"""The gateway: agents speak the OpenAI API to it, and the tokens that they sampled are the tokens that are trained."""
