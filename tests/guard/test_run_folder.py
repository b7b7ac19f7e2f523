"""The small files that a training and its supervisor share."""

from concurrent.futures import ThreadPoolExecutor

from rmetric.guard.run_folder import RunFolder


def test_concurrent_requests_get_a_number_each_and_none_is_lost(tmp_path):
    def ask(number):
        return RunFolder(tmp_path).ask("user", f"asker {number}", stop=number == 7)

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(ask, range(40)))
    assert sorted(numbers) == list(range(1, 41))
    assert RunFolder(tmp_path).request().number == 40
    assert RunFolder(tmp_path).request().stop
