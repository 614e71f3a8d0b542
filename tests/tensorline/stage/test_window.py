"""How far a stream may be ahead of its reader."""

import threading
import time

from tensorline.stage.window import ResponseWindow


def test_room_for_so_many_responses() -> None:
    window = ResponseWindow(2)
    for _ in range(2):
        assert window.wait_room(0)
        window.add(1)
    assert not window.wait_room(0)
    window.take(1)
    assert window.wait_room(0)
    window.take(5)  # more than were sent
    window.add(1)
    assert window.wait_room(0)


def test_room_for_so_many_bytes_and_for_one_of_any_size() -> None:
    window = ResponseWindow(8, byte_size=100)
    window.add(1000)
    assert not window.wait_room(0)
    window.take(1)
    window.add(60)
    assert window.wait_room(0)
    window.add(60)
    assert not window.wait_room(0)


def test_no_limit() -> None:
    window = ResponseWindow(0)
    for _ in range(1000):
        window.add(1 << 30)
    assert window.wait_room(0)


def test_who_waits_is_woken() -> None:
    for has_room in (True, False):
        answers: list[bool] = []
        window = ResponseWindow(1)
        window.add(1)

        def wait(window: ResponseWindow = window, answers: list[bool] = answers) -> None:
            answers.append(window.wait_room(None))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.01)
        if has_room:
            window.take(1)
        else:
            window.close()
        thread.join(5)
        assert answers == [has_room]


def test_closed_means_closed() -> None:
    window = ResponseWindow(1)
    window.close()
    assert not window.wait_room(None)
