"""Python backend of Triton: y is what the model sees beside its tensors, as JSON."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        told = {"id": request.request_id(), "parameters": json.loads(request.parameters())}
        text = json.dumps(told, sort_keys=True).encode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([text], dtype=np.object_))])
