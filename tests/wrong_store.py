"""Planted mistakes in the folder of a run: its checkpoints, links, locks and exporters."""

from wrong import table

WRONG = table("""
the count of a cosine of 0.4 is wanted no more, and stops a run
  run.store.checkpoint: test_formats.py::test_cosine_count_of_version_04_is_dropped
  - if MUON in name or re.fullmatch(
  + if MUON in name and re.fullmatch(
moments of 0.4 are joined in the order of their names
  run.store.checkpoint: test_formats.py::test_cosine_count_of_version_04_is_dropped
  - for each in parameters if old + each in found
  + for each in sorted(parameters, reverse=True) if old + each in found
Adam keeps its count where it takes over from Muon
  run.store.checkpoint: test_formats.py::test_muon_of_version_04_restarts_its_adam
  - if ADAM in name and leaf.size}
  + if ADAM in name and leaf.size and name not in found}
a policy is loaded with the state of its optimizer
  run.experiment.earlier: test_formats.py::test_a_policy_loads_without_its_optimizer_state
  - flag, run, kind, optimizer=False)
  + flag, run, kind)
what is not in the list of checksums damages a checkpoint
  run.store.checkpoint:
    test_checkpoint.py::test_files_that_a_viewer_or_a_file_system_leaves_behind_damage_nothing
  - return "intact" if same and all(same) else "damaged"
  + return "intact" if checksums(step / ITEM) == dict(listed) else "damaged"
an empty list of checksums vouches for a checkpoint
  run.store.checkpoint:
    test_checkpoint.py::test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_is_used
  - return "intact" if same and all(same)
  + return "intact" if all(same)
a checkpoint that is deleted while it is read is taken for whole
  run.store.checkpoint:
    test_checkpoint.py::test_a_checkpoint_that_its_writer_deletes_while_it_is_read_is_not_used
  - if condition_of(step) == "intact":
  -                     return iteration, arrays
  + if arrays:
  +                     return iteration, arrays
a folder of a later format is read as if it were of this one
  run.errors: test_formats.py::test_folder_of_another_format_is_left_unchanged
  - if number in FORMATS:
  + if number:
a checkpoint of a later format is read as if it were of this one
  run.store.checkpoint: test_formats.py::test_checkpoint_of_a_later_format_is_retained
  - if why := unread_format(arrays.pop(FORMAT, None)):
  + if (number := arrays.pop(FORMAT, None)) is None and (why := unread_format(number)):
what a link leads to is overwritten
  run.store.folder: test_folder.py::test_overwriting_removes_links_and_keeps_their_targets
  - if path.is_symlink() or not path.is_dir():
  + if not path.is_dir():
a file system without locks is in use by another run
  run.store.folder: test_folder.py::test_file_system_without_locks_is_noted_and_used
  - except BlockingIOError:
  + except OSError:
an exporter is not closed
  run.store.exporters:
    test_exporters.py::test_own_exporter_closes_if_the_run_ends_early[RuntimeError]
  - ((self._exporter.close,), None) if self._exports else (None,)
  + (None,)
every process exports
  run.experiment.training: test_exporters.py::test_flag_and_list_export_an_experiment
  - [*output.exporters, *exporters] if processes.is_writer() else ()
  + [*output.exporters, *exporters]
a learner trains on one core after the import of gymnax
  run.devices.parallel: test_parallel.py::test_cores_are_devices_if_jax_started_with_one
  - tuple(client.devices())
  + ()
a run waits for an exporter however long that takes
  run.store.exporters: test_exporters.py::test_hanging_exporter_is_reported_and_run_continues
  - self.join(PATIENCE)
  + self.join()
a file of code of any content may take the place of one that was moved
  run.store.sources: test_moved_runs.py::test_code_is_found_by_its_digest
  - lambda path: _digest(f'{path}:{name}') == digest
  + os.path.isfile
a run finds only what lies where it was
  run.store.sources: test_moved_runs.py::test_moved_run_loads_and_resumes
  - [*moved, stored] if
  + [stored] if
a copy of a run reads the data of the original
  run.store.sources: test_moved_runs.py::test_data_of_a_moved_run_lie_beside_it
  - [*moved, stored] if
  + [stored, *moved] if
a policy is loaded with other code than its run had
  run.experiment.earlier: test_moved_runs.py::test_new_path_needs_the_same_content
  - folder.require_same(anew, stored, {}, run)
  + pass
a mount point cannot be overwritten
  run.store.folder: test_folder.py::test_overwriting_empties_a_mount_point
  - (errno.EBUSY, errno.ENOTEMPTY)
  + ()
""")
