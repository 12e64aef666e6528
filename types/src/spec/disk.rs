//! Disks as callers ask for them, and their names in the guest.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::fields::{Fields, ValidationFindings};
use crate::object::string_enum;
use crate::{Error, Result};

/// The largest disk: beyond it nobody means it, and its bytes would be hard to count.
pub const MAX_DISK_GB: u64 = 1_000_000;

string_enum! {
    /// How a disk is connected.
    DiskBus {
        Sata = "sata",
        Scsi = "scsi",
        Usb = "usb",
        Virtio = "virtio",
        Nvme = "nvme",
    }
}

string_enum! {
    /// What a disk looks like to the guest.
    DiskType {
        Disk = "disk",
        Cdrom = "cdrom",
    }
}

/// A disk as a caller asks for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskSpec {
    /// In gigabytes; nothing: as large as its base.
    pub size: Option<u64>,
    /// The image that it begins as; nothing: empty.
    pub base: Option<String>,
    pub bus: DiskBus,
    #[serde(rename = "type")]
    pub disk_type: DiskType,
}

/// Reads the `disk` list of an instance.
pub fn parse_disks(
    value: Option<&Value>,
    default_bus: DiskBus,
    findings: &mut ValidationFindings,
) -> Result<Vec<DiskSpec>> {
    let refuse = |text: &str| Err(Error::Invalid(text.into()));
    let elements = match value {
        None | Some(Value::Null) => &Vec::new(),
        Some(Value::Array(elements)) => elements,
        Some(_) => return refuse("disk: Not a valid list."),
    };
    if elements.is_empty() {
        return refuse("instance must specify at least one disk");
    }
    if !elements.iter().all(Value::is_object) {
        return refuse("disk specification should contain JSON objects");
    }
    let read = |(at, element)| disk(element, &format!("disk[{at}]"), default_bus, findings);
    elements.iter().enumerate().map(read).collect()
}

fn disk(
    value: &Value,
    path: &str,
    default_bus: DiskBus,
    findings: &mut ValidationFindings,
) -> Result<DiskSpec> {
    let Value::Object(values) = value else {
        return Err(Error::Invalid("disk specification should contain JSON objects".into()));
    };
    let fields = Fields::new(path, values, &["size", "base", "bus", "type"], findings)?;
    // Released clients that cannot leave a size out send 0.
    let size = fields.count("size", MAX_DISK_GB)?.filter(|size| *size > 0);
    let base = fields.filled_text("base")?.filter(|base| !base.eq_ignore_ascii_case("none"));
    let bus = fields.word("bus", fields.filled_text("bus")?, DiskBus::ALL, DiskBus::as_str)?;
    let disk_type = fields.word("type", fields.filled_text("type")?, DiskType::ALL, DiskType::as_str)?;
    if size.is_none() && base.is_none() {
        return Err(Error::Invalid(format!("{path}: a disk needs a size or a base")));
    }
    Ok(DiskSpec {
        size,
        base: base.map(str::to_owned),
        bus: bus.unwrap_or(default_bus),
        disk_type: disk_type.unwrap_or(DiskType::Disk),
    })
}

/// What a device of the guest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskRole {
    /// The disk with this place in the list of specs.
    Disk(usize),
    ConfigDrive,
}

/// A disk's place in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskDevice {
    /// Its name, such as `vda`.
    pub device: String,
    /// Where it is really connected.
    pub bus: DiskBus,
    pub role: DiskRole,
}

/// Where disks go: the first one, the config drive, the others. The number counts over all buses, hence a name is
/// never given twice, and says which disk it is even if the buses differ.
#[must_use]
pub fn layout_disks(disks: &[DiskSpec], config_drive: bool) -> Vec<DiskDevice> {
    let buses = disks.iter().map(|disk| match (disk.bus, disk.disk_type) {
        // There are no CD drives on virtio.
        (DiskBus::Virtio, DiskType::Cdrom) => DiskBus::Usb,
        (bus, _) => bus,
    });
    let mut order: Vec<(DiskBus, DiskRole)> =
        buses.enumerate().map(|(at, bus)| (bus, DiskRole::Disk(at))).collect();
    if let Some((bus, _)) = order.first().copied().filter(|_| config_drive) {
        order.insert(1, (bus, DiskRole::ConfigDrive));
    }
    let place = |(at, (bus, role))| DiskDevice { device: device_name(bus, at), bus, role };
    order.into_iter().enumerate().map(place).collect()
}

/// The name that Linux gives to the disk number `at` of a bus.
fn device_name(bus: DiskBus, at: usize) -> String {
    let prefix = match bus {
        DiskBus::Virtio => "vd",
        DiskBus::Sata | DiskBus::Scsi | DiskBus::Usb => "sd",
        DiskBus::Nvme => return format!("nvme{at}"),
    };
    // After `z` comes `aa`: digits without a zero.
    let mut letters = Vec::new();
    let mut rest = at + 1;
    while rest > 0 {
        rest -= 1;
        letters.push(char::from(b'a' + u8::try_from(rest % 26).unwrap_or_default()));
        rest /= 26;
    }
    prefix.chars().chain(letters.into_iter().rev()).collect()
}
