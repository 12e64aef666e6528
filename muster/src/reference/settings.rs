//! The page of all settings.

use std::collections::BTreeMap;

use muster_types::settings::Settings;

use super::text::{NOTICE, cell, code};

pub(super) fn page() -> String {
    let settings = Settings::new(&BTreeMap::new(), &BTreeMap::new()).unwrap();
    assert_eq!(settings.effective.len(), Settings::NAMES.len());
    let mut page = format!(
        "# Settings\n\n{NOTICE} How settings are read is in [Operating Muster](../operations.md#settings); `muster config` prints \
         those of a host.\n\n| setting | default | meaning |\n|---|---|---|\n"
    );
    for setting in &settings.effective {
        let (name, default) = (setting.name, code(&setting.value));
        page.push_str(&format!("| `{name}` | {default} | {} |\n", cell(setting.description)));
    }
    page
}
