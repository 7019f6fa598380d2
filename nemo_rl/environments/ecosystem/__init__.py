"""Environments of other projects as agents: MCP, OpenEnv, verifiers and Harbor; nothing else imports this package."""
