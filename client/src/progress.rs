//! How far something has come, on standard error: a bar on a terminal, elsewhere a line now and then. Standard
//! output is for data.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::{bytes, visible};

/// Between two lines where no bar can be drawn.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Drawings of a bar per second.
const DRAWINGS: u8 = 8;
const KNOWN: &str =
    "{msg} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left";
const WAITING: &str = "{msg} {spinner}";
const UNKNOWN: &str = "{msg} {spinner} {binary_bytes} {binary_bytes_per_sec}";

/// Shows how many bytes of something are done. It is gone from the screen when dropped.
#[derive(Debug, Clone)]
pub(crate) struct Meter {
    shown: Arc<Shown>,
}

#[derive(Debug)]
struct Shown {
    bar: ProgressBar,
    title: String,
    begun: Instant,
    /// Where it was when it began.
    start: u64,
    /// When the last line was written, where no bar is. Without this there are none.
    line: Option<Mutex<Instant>>,
}

impl Meter {
    /// Begins at `start` of perhaps `total` bytes.
    pub(crate) fn new(title: &str, start: u64, total: Option<u64>) -> Self {
        let target = ProgressDrawTarget::stderr_with_hz(DRAWINGS);
        Self::drawn(title, start, total, target, Some(Mutex::new(Instant::now())))
    }

    /// Tells what is waited for, without counting.
    pub(crate) fn waiting(title: &str) -> Self {
        let meter = Self::new(title, 0, None);
        meter.shown.bar.set_style(styled(WAITING));
        meter
    }

    /// Counts, and shows nothing: standard error is somebody else's.
    pub(crate) fn hidden() -> Self {
        Self::drawn("", 0, None, ProgressDrawTarget::hidden(), None)
    }

    fn drawn(
        title: &str,
        start: u64,
        total: Option<u64>,
        target: ProgressDrawTarget,
        line: Option<Mutex<Instant>>,
    ) -> Self {
        let bar = ProgressBar::with_draw_target(total, target).with_message(visible(title));
        bar.set_style(style(total));
        bar.set_position(start);
        // What was there before took no time now.
        bar.reset_eta();
        let shown = Shown { bar, title: visible(title), begun: Instant::now(), start, line };
        Self { shown: Arc::new(shown) }
    }

    /// Tells how many bytes are done.
    pub(crate) fn at(&self, done: u64) {
        let Shown { bar, title, begun, start, line } = &*self.shown;
        bar.set_position(done);
        let Some(line) = line.as_ref().filter(|_| bar.is_hidden()) else { return };
        let mut last = line.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() < LINE_EVERY {
            return;
        }
        *last = Instant::now();
        let rate = rate(done.saturating_sub(*start), begun.elapsed());
        match bar.length().filter(|total| *total > 0) {
            Some(total) => {
                let percent = u128::from(done) * 100 / u128::from(total);
                eprintln!("{title}: {} of {} ({percent} %), {rate}", bytes(done), bytes(total));
            }
            None => eprintln!("{title}: {}, {rate}", bytes(done)),
        }
    }

    /// Tells how many bytes it will be.
    pub(crate) fn set_total(&self, total: u64) {
        if self.shown.bar.length() != Some(total) {
            self.shown.bar.set_length(total);
            self.shown.bar.set_style(style(Some(total)));
        }
    }

    /// How many bytes are done.
    pub(crate) fn done(&self) -> u64 {
        self.shown.bar.position()
    }

    /// Says something without disturbing the bar.
    pub(crate) fn say(&self, text: &str) {
        self.shown.bar.suspend(|| eprintln!("{}", visible(text)));
    }

    /// Says in the bar what is waited for; nothing ends that.
    pub(crate) fn wait_for(&self, what: &str) {
        let title = &self.shown.title;
        let text = if what.is_empty() { title.clone() } else { format!("{title}: {}", visible(what)) };
        self.shown.bar.set_message(text);
        self.shown.bar.tick();
    }

    /// How much was moved, and how fast.
    pub(crate) fn summary(&self) -> String {
        pace(self.done().saturating_sub(self.shown.start), self.shown.begun.elapsed())
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn style(total: Option<u64>) -> ProgressStyle {
    styled(if total.is_some() { KNOWN } else { UNKNOWN })
}

fn styled(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("=> ")
}

/// How much was moved in which time, and how fast that is.
pub(crate) fn pace(moved: u64, time: Duration) -> String {
    format!("{} in {:.1} s, {}", bytes(moved), time.as_secs_f64(), rate(moved, time))
}

fn rate(moved: u64, time: Duration) -> String {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate for people"
    )]
    let rate = (moved as f64 / time.as_secs_f64().max(0.001)) as u64;
    format!("{}/s", bytes(rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_are_understood() {
        for template in [KNOWN, UNKNOWN, WAITING] {
            ProgressStyle::with_template(template).unwrap();
        }
    }

    #[test]
    fn only_what_was_moved_now_counts_for_the_rate() {
        let meter = Meter::new("upload", 1 << 20, Some(3 << 20));
        meter.at(3 << 20);
        assert!(meter.summary().starts_with("2.0 MiB in "), "{}", meter.summary());
        assert_eq!(rate(10 << 20, Duration::from_secs(2)), "5.0 MiB/s");
    }
}
