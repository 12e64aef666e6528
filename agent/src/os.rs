//! Threads, sleeping and error texts, for all other modules.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::errno::Errno;

/// The stack size of a thread. None of them needs much.
const THREAD_STACK_SIZE: usize = 256 << 10;

/// Starts a thread with a small stack.
pub(crate) fn spawn_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    thread::Builder::new().stack_size(THREAD_STACK_SIZE).spawn(work)
}

/// Blocks the current thread.
#[expect(clippy::disallowed_methods, reason = "for devices and processes that can only be polled")]
pub(crate) fn sleep(duration: Duration) {
    thread::sleep(duration);
}

/// Returns the system's description of an error, without the number that `Display` adds.
pub(crate) fn error_text(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => Errno::from_raw(number).desc().to_owned(),
        None => error.to_string(),
    }
}
