//! The text formats in which metrics are served to Prometheus.

use std::collections::HashSet;

use prometheus_client::encoding::text::encode as encode_openmetrics;
use prometheus_client::registry::Registry;

/// A text format for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// The Prometheus text format, version 0.0.4.
    Prometheus,
    /// OpenMetrics, version 1.0.0.
    OpenMetrics,
}

/// Encodes the metrics of a registry.
#[must_use]
pub fn encode(registry: &Registry, format: ExpositionFormat) -> String {
    let mut text = String::new();
    encode_openmetrics(&mut text, registry).expect("writing to a string does not fail");
    match format {
        ExpositionFormat::OpenMetrics => text,
        ExpositionFormat::Prometheus => to_prometheus(&text),
    }
}

/// Converts OpenMetrics text. There, the metadata of a counter omits the suffix `_total` of its samples; in the Prometheus
/// format, a sample without metadata of the same name has no type.
fn to_prometheus(text: &str) -> String {
    let counters: HashSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut converted = String::with_capacity(text.len() + 64);
    for line in text.lines().filter(|line| *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        let metadata = (words.next(), words.next(), words.next(), words.next());
        match metadata {
            (Some("#"), Some(keyword), Some(name), Some(rest)) if counters.contains(name) => {
                converted.push_str(&format!("# {keyword} {name}_total {rest}\n"));
            }
            _ => {
                converted.push_str(line);
                converted.push('\n');
            }
        }
    }
    converted
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;

    fn registry() -> Registry {
        let mut registry = Registry::default();
        let (events, depth) = (Counter::<u64>::default(), Gauge::<i64>::default());
        registry.register("events", "Events", events.clone());
        registry.register("depth", "Depth", depth.clone());
        events.inc_by(3);
        depth.set(7);
        registry
    }

    #[test]
    fn type_lines_of_the_prometheus_format_name_their_samples() {
        let text = encode(&registry(), ExpositionFormat::Prometheus);
        assert_eq!(
            text,
            "# HELP events_total Events.\n# TYPE events_total counter\nevents_total 3\n\
             # HELP depth Depth.\n# TYPE depth gauge\ndepth 7\n"
        );
    }

    #[test]
    fn openmetrics_ends_with_its_marker() {
        let text = encode(&registry(), ExpositionFormat::OpenMetrics);
        assert!(text.contains("# TYPE events counter\nevents_total 3\n"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
