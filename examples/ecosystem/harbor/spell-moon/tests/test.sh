#!/bin/bash
# 1 if answer.txt holds the word of word.txt spelled backward, else 0.
if [ "$(tr -d '[:space:]' < /app/answer.txt)" = "$(rev < /app/word.txt)" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
