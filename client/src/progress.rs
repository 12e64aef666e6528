//! Progress on standard error: a bar on a terminal, periodic lines elsewhere. Standard output is for data.

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use muster_types::operation::OperationProgress;
use parking_lot::Mutex;

use crate::output::{escape_control, format_bytes, is_quiet, status};

/// The interval between lines where no bar can be drawn.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
const DRAWS_PER_SECOND: u8 = 8;
const KNOWN_TOTAL: &str =
    "{msg} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left";
const UNKNOWN_TOTAL: &str = "{msg} {spinner} {binary_bytes} {binary_bytes_per_sec}";
const SPINNER: &str = "{msg} {spinner}";

/// Shows how many bytes of a transfer are done. Disappears from the screen when dropped.
#[derive(Debug, Clone)]
pub struct ProgressMeter {
    state: Arc<MeterState>,
}

#[derive(Debug)]
struct MeterState {
    bar: ProgressBar,
    title: String,
    started: Instant,
    /// The initial position.
    start: u64,
    /// When the last line was printed where no bar is drawn. `None` prints no lines.
    last_line: Option<Mutex<Instant>>,
}

impl ProgressMeter {
    /// Creates a meter at position `start`.
    #[must_use]
    pub fn new(title: &str, start: u64, total: Option<u64>) -> Self {
        if is_quiet() {
            return Self::hidden();
        }
        let target = ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND);
        Self::with_target(title, start, total, target, Some(Mutex::new(Instant::now())))
    }

    /// Creates a meter that shows activity but no position.
    pub(crate) fn spinner(title: &str) -> Self {
        let meter = Self::new(title, 0, None);
        meter.state.bar.set_style(style(SPINNER));
        meter.announce();
        meter
    }

    /// Prints the title where no bar can be drawn, so that it is known what the command waits for.
    pub(crate) fn announce(&self) {
        if self.state.bar.is_hidden() {
            status(&self.state.title);
        }
    }

    /// Creates a meter that counts but shows nothing.
    pub(crate) fn hidden() -> Self {
        Self::with_target("", 0, None, ProgressDrawTarget::hidden(), None)
    }

    fn with_target(
        title: &str,
        start: u64,
        total: Option<u64>,
        target: ProgressDrawTarget,
        last_line: Option<Mutex<Instant>>,
    ) -> Self {
        let bar = ProgressBar::with_draw_target(total, target).with_message(escape_control(title));
        bar.set_style(bar_style(total));
        bar.set_position(start);
        // The initial position must not count as progress.
        bar.reset_eta();
        let title = escape_control(title);
        Self { state: Arc::new(MeterState { bar, title, started: Instant::now(), start, last_line }) }
    }

    /// Sets how many bytes are done.
    pub fn set_position(&self, done: u64) {
        let MeterState { bar, title, started, start, last_line } = &*self.state;
        bar.set_position(done);
        let Some(last_line) = last_line.as_ref().filter(|_| bar.is_hidden()) else { return };
        let mut last_line = last_line.lock();
        if last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        *last_line = Instant::now();
        let rate = format_rate(done.saturating_sub(*start), started.elapsed());
        match bar.length().filter(|total| *total > 0) {
            Some(total) => {
                let percent = u128::from(done) * 100 / u128::from(total);
                let (done, total) = (format_bytes(done), format_bytes(total));
                crate::message!("{title}: {done} of {total} ({percent} %), {rate}");
            }
            None => crate::message!("{title}: {}, {rate}", format_bytes(done)),
        }
    }

    /// Sets the total number of bytes.
    pub(crate) fn set_total(&self, total: u64) {
        if self.state.bar.length() != Some(total) {
            self.state.bar.set_length(total);
            self.state.bar.set_style(bar_style(Some(total)));
        }
    }

    /// Returns how many bytes are done.
    pub(crate) fn position(&self) -> u64 {
        self.state.bar.position()
    }

    /// Prints a line without disturbing the bar.
    pub(crate) fn println(&self, text: &str) {
        self.state.bar.suspend(|| crate::message!("{}", escape_control(text)));
    }

    /// Shows a status after the title, or removes it if `status` is empty.
    pub(crate) fn set_status(&self, status: &str) {
        let title = &self.state.title;
        let text =
            if status.is_empty() { title.clone() } else { format!("{title}: {}", escape_control(status)) };
        self.state.bar.set_message(text);
        self.state.bar.tick();
    }

    /// Returns how many bytes were transferred, and how fast.
    pub(crate) fn summary(&self) -> String {
        format_throughput(self.position().saturating_sub(self.state.start), self.state.started.elapsed())
    }
}

impl Drop for MeterState {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Shows the progress of an operation. The server counts bytes, so negative numbers are not shown.
pub(crate) fn show_progress(meter: &ProgressMeter, progress: &OperationProgress) {
    if let Some(total) = progress.total.and_then(|total| u64::try_from(total).ok()) {
        meter.set_total(total);
    }
    if let Ok(done) = u64::try_from(progress.done) {
        meter.set_position(done);
    }
}

fn bar_style(total: Option<u64>) -> ProgressStyle {
    style(if total.is_some() { KNOWN_TOTAL } else { UNKNOWN_TOTAL })
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .expect("the templates are constants and tested")
        .progress_chars("=> ")
}

/// Formats an amount of data, the time that its transfer took, and the rate.
pub(crate) fn format_throughput(transferred: u64, time: Duration) -> String {
    let rate = format_rate(transferred, time);
    format!("{} in {:.1} s, {rate}", format_bytes(transferred), time.as_secs_f64())
}

fn format_rate(transferred: u64, time: Duration) -> String {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an approximate rate"
    )]
    let rate = (transferred as f64 / time.as_secs_f64().max(0.001)) as u64;
    format!("{}/s", format_bytes(rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_valid() {
        for template in [KNOWN_TOTAL, UNKNOWN_TOTAL, SPINNER] {
            style(template);
        }
    }

    #[test]
    fn rate_excludes_the_initial_position() {
        let meter = ProgressMeter::new("upload", 1 << 20, Some(3 << 20));
        meter.set_position(3 << 20);
        assert!(meter.summary().starts_with("2.0 MiB in "), "{}", meter.summary());
        assert_eq!(format_rate(10 << 20, Duration::from_secs(2)), "5.0 MiB/s");
    }
}
