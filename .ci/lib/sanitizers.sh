# How programs of a build with AddressSanitizer run, so that no report is lost.

# report_to FOLDER: what is started from here on writes a report to FOLDER/sanitizer.PID and ends with status 86.
# (UndefinedBehaviorSanitizer of gcc 12 ends it, too, but writes to stderr.) Crashes are reported like the rest: else
# UCX, Python and pytest would handle those signals.
report_to() {
  mkdir -p "$1"
  export FARANDOLE_SANITIZER_REPORTS=$1
  local common=log_path=$1/sanitizer:exitcode=86:handle_segv=2:handle_sigbus=2:handle_sigfpe=2:handle_sigill=2
  export ASAN_OPTIONS=$common:detect_stack_use_after_return=1:strict_string_checks=1
  export UBSAN_OPTIONS=$common:print_stacktrace=1
  export LSAN_OPTIONS=suppressions=$ROOT/.ci/lib/leaks.supp:print_suppressions=0
  # UCX 1.22 has process_vm_readv overwrite the very description of what to read, by which the sanitizer then goes.
  export UCX_MODULES=^cma
}

# with_sanitizers BUILD/python COMMAND...: runs the interpreter with what farandole._C was linked against, which must be
# there first. The interpreter itself leaves much behind at its end: no search for leaks.
with_sanitizers() {
  local folder=$1 runtime
  shift
  runtime=$(ldd "$folder"/farandole/_C*.so | awk '/lib(asan|ubsan|stdc\+\+)\.so/ { print $3 }' | paste -sd:)
  env LD_PRELOAD="$runtime" PYTHONPATH="$folder" ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0" "$@"
}

# show_reports FOLDER: prints the reports in it, and fails when there is one.
show_reports() {
  local report found=0
  for report in "$1"/sanitizer.*; do
    [ -f "$report" ] || continue
    found=1
    printf '\n--- %s\n' "${report#"$ROOT"/}" >&2
    head -60 "$report" >&2
  done
  return $found
}
