"""Python backend of Triton: hands x on; a request with a negative value gets an error of the model's own."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def answer(self, x):
        if (x < 0).any():
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError("bad row"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
