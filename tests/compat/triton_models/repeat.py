"""Python backend of Triton, decoupled: for each element of IN a response: OUT, and its place IDX."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            delays = pb_utils.get_input_tensor_by_name(request, "DELAY").as_numpy()
            sender = request.get_response_sender()
            for index, value in enumerate(values):
                time.sleep(float(delays[index % len(delays)]) / 1000)
                out = pb_utils.Tensor("OUT", np.array([value], np.int32))
                place = pb_utils.Tensor("IDX", np.array([index], np.uint32))
                sender.send(pb_utils.InferenceResponse([out, place]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
