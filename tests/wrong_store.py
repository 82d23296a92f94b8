"""Wrong programs of the folder of a run: its checkpoints, links, locks and exporters."""

from wrong import Wrong

WRONG = [
    Wrong(
        "what is not in the list of checksums damages a checkpoint",
        "run.store.checkpoint",
        'return "intact" if same and all(same) else "damaged"',
        'return "intact" if checksums(step / ITEM) == dict(listed) else "damaged"',
        (
            "test_checkpoint.py::"
            "test_files_that_a_viewer_or_a_file_system_leaves_behind_damage_nothing",
        ),
    ),
    Wrong(
        "an empty list of checksums vouches for a checkpoint",
        "run.store.checkpoint",
        'return "intact" if same and all(same)',
        'return "intact" if all(same)',
        ("test_checkpoint.py::test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_is_used",),
    ),
    Wrong(
        "a checkpoint that is deleted while it is read is taken for whole",
        "run.store.checkpoint",
        'if condition_of(step) == "intact":\n                    return iteration, arrays',
        "if arrays:\n                    return iteration, arrays",
        (
            "test_checkpoint.py::"
            "test_a_checkpoint_that_its_writer_deletes_while_it_is_read_is_not_used",
        ),
    ),
    Wrong(
        "a folder of a later format is read as if it were of this one",
        "run.store.failures",
        "if number in FORMATS:",
        "if number:",
        ("test_formats.py::test_a_folder_of_another_format_is_named_and_left_as_it_is",),
    ),
    Wrong(
        "a checkpoint of a later format is read as if it were of this one",
        "run.store.checkpoint",
        "if why := failures.unread(arrays.pop(FORMAT, None)):",
        "if (number := arrays.pop(FORMAT, None)) is None and (why := failures.unread(number)):",
        ("test_formats.py::test_a_checkpoint_of_a_later_format_is_named_and_kept",),
    ),
    Wrong(
        "what a link leads to is overwritten",
        "run.store.folder",
        "if path.is_symlink() or not path.is_dir():",
        "if not path.is_dir():",
        ("test_folder.py::test_overwriting_removes_links_and_not_what_they_lead_to",),
    ),
    Wrong(
        "a file system without locks is in use by another run",
        "run.store.folder",
        "except BlockingIOError:",
        "except OSError:",
        ("test_folder.py::test_a_file_system_without_locks_is_said_and_used",),
    ),
    Wrong(
        "a run waits for an exporter however long that takes",
        "run.store.exporters",
        "self.join(PATIENCE)",
        "self.join()",
        ("test_exporters.py::test_an_exporter_that_hangs_is_told_and_the_run_goes_on",),
    ),
    Wrong(
        "a file of code of any content may take the place of one that was moved",
        "run.experiment.user_code",
        "if _digest(moved) == digest:",
        "if os.path.isfile(moved.rpartition(':')[0]):",
        (
            "test_front_door.py::"
            "test_a_run_with_code_of_ones_own_is_resumed_after_its_project_was_renamed",
        ),
    ),
]
