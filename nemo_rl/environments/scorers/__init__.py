"""Rewards of whole rollouts: rules, reward models, served ones and judges, behind `interfaces.Scorer`."""
