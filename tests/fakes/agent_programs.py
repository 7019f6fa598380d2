"""The beginning of programs that are agents: they ask the policy once and can report."""

ASK = """
import json, os, sys, urllib.request
asked = json.load(sys.stdin)
body = json.dumps({"model": "any", "messages": asked["messages"]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
completion = json.load(opener.open(request))
said = completion["choices"][0]["message"]["content"]
def report(**fields):
    os.write(int(os.environ["NEMO_RL_REPORT_FD"]), json.dumps({"report_key": asked["report_key"], **fields}).encode())
"""
