import subprocess

import pytest

from tests.consul import fetch_consul
from tests.deploy.images import ROOT


@pytest.mark.consul
def test_the_agent_takes_its_configuration() -> None:
    command = [str(fetch_consul()), "validate", str(ROOT / "deploy" / "consul" / "agent.hcl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Configuration is valid!" in done.stdout
