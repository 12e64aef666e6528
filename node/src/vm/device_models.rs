//! Validates the device models of displays and network interfaces. Users choose them by name, and QEMU would accept any
//! device for either, so only those that QEMU lists in the right category are allowed. See
//! docs/decisions/0021.

use std::collections::BTreeSet;

use muster_types::vm::{NicPlan, VmPlan};
use muster_types::{Error, Result};

use super::qemu_args;
use crate::command::{COMMAND_TIMEOUT, Commands, Tool};

/// The device models that QEMU supports, by category.
#[derive(Debug, Default)]
pub(super) struct DeviceModels {
    displays: BTreeSet<String>,
    networks: BTreeSet<String>,
}

impl DeviceModels {
    /// Queries QEMU.
    pub(super) fn query(commands: &Commands) -> Result<Self> {
        let output = commands.run(Tool::QemuSystem, &["-device", "help"], "", COMMAND_TIMEOUT)?;
        // It depends on the release which of the two has the list.
        Ok(Self::parse(if output.stdout.trim().is_empty() { &output.stderr } else { &output.stdout }))
    }

    fn parse(help: &str) -> Self {
        let mut models = Self::default();
        let mut section = "";
        for line in help.lines() {
            let Some(rest) = line.strip_prefix("name \"") else {
                section = line.trim();
                continue;
            };
            let list = match section {
                "Display devices:" => &mut models.displays,
                "Network devices:" => &mut models.networks,
                _ => continue,
            };
            // The name and an optional alias, both quoted, precede the description.
            let names = rest.split(", desc ").next().unwrap_or_default();
            list.extend(names.split('"').step_by(2).map(str::to_owned).filter(|name| !name.is_empty()));
        }
        models
    }

    /// Rejects a plan with a device model of the wrong category.
    pub(super) fn check(&self, plan: &VmPlan) -> Result<()> {
        if let Some(driver) = qemu_args::video_driver(&plan.video)
            && !self.displays.contains(&driver)
        {
            let model = &plan.video.model;
            return Err(Error::Conflict(format!("'{model}' is not a display device that QEMU supports")));
        }
        plan.nics.iter().try_for_each(|nic| self.check_nic(nic))
    }

    pub(super) fn check_nic(&self, nic: &NicPlan) -> Result<()> {
        if self.networks.contains(qemu_args::nic_driver(nic)) {
            return Ok(());
        }
        Err(Error::Conflict(format!("'{}' is not a network device that QEMU supports", nic.model)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_models_by_category() {
        let models = DeviceModels::parse(
            "Storage devices:\nname \"nvme\", bus PCI, desc \"disk\"\n\nNetwork devices:\n\
             name \"e1000\", bus PCI, alias \"e1000-82540em\", desc \"Intel \"x\"\"\nname \"rtl8139\", bus PCI\n\n\
             Display devices:\nname \"VGA\", bus PCI\n\nMisc devices:\nname \"pvpanic\", bus ISA\n",
        );
        let networks: Vec<&str> = models.networks.iter().map(String::as_str).collect();
        assert_eq!(networks, ["e1000", "e1000-82540em", "rtl8139"]);
        assert_eq!(models.displays.into_iter().collect::<Vec<_>>(), ["VGA"]);
    }
}
