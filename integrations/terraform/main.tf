# A network and instances in Muster, for Terraform and OpenTofu. It needs no provider: terraform_data is built in, and the
# program object beside this file sends the requests. See docs/integrations.md.
terraform {
  required_version = ">= 1.4"
}

variable "instances" {
  description = "The names of the instances."
  type        = set(string)
  default     = ["web-1", "web-2"]
}

variable "image" {
  description = "The image of their first disk, such as label:debian; empty for an empty disk."
  type        = string
  default     = ""
}

locals {
  network = jsonencode({ name = "terraform", netblock = "10.62.0.0/24", provide_dhcp = true, provide_nat = true })
  instances = {
    for name in var.instances : name => jsonencode({
      name    = name
      cpus    = 1
      memory  = 512
      disk    = [merge({ size = 8 }, var.image == "" ? {} : { base = var.image })]
      network = [{ network_uuid = "terraform" }]
    })
  }
}

# A changed body replaces the object.
resource "terraform_data" "network" {
  input            = "terraform"
  triggers_replace = local.network

  provisioner "local-exec" {
    command     = "${path.module}/object create networks ${self.input}"
    environment = { BODY = local.network }
  }

  provisioner "local-exec" {
    when    = destroy
    command = "${path.module}/object delete networks ${self.input}"
  }
}

resource "terraform_data" "instance" {
  for_each         = local.instances
  input            = each.key
  triggers_replace = [each.value, terraform_data.network.id]

  provisioner "local-exec" {
    command     = "${path.module}/object create instances ${self.input}"
    environment = { BODY = each.value }
  }

  provisioner "local-exec" {
    when    = destroy
    command = "${path.module}/object delete instances ${self.input}"
  }
}
